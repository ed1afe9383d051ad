"""Check digits and letters of numbers that bear them. Arguments are digits, or capitals and digits, without spaces."""

from __future__ import annotations

from typing import Final


def luhn(digits: str) -> bool:
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = int(digit) * (2 if place % 2 else 1)
        total += value - 9 if value > 9 else value
    return total % 10 == 0


def iban(text: str) -> bool:
    """ISO 7064, MOD 97-10."""
    return int("".join(str(int(each, 36)) for each in text[4:] + text[:4])) % 97 == 1


def mod_11_10(digits: str) -> bool:
    """ISO 7064, as the last digit of a German Steuer-ID is reckoned."""
    product = 10
    for digit in digits[:-1]:
        product = ((int(digit) + product) % 10 or 10) * 2 % 11
    return (11 - product) % 10 == int(digits[-1])


def steuer_id(digits: str) -> bool:
    """Of its first ten digits one comes twice or thrice, the others once at most."""
    counts = sorted(digits[:10].count(each) for each in "0123456789")
    often = counts[-1] in (2, 3) and counts[-2] == 1
    return digits[0] != "0" and often and mod_11_10(digits)


def ssn(digits: str) -> bool:
    """It has no check digit, but areas, groups and serials that are never given."""
    area, group, serial = digits[:3], digits[3:5], digits[5:]
    return area not in ("000", "666") and area[0] != "9" and group != "00" and serial != "0000"


_DNI: Final = "TRWAGMYFPDXBNJZSQVHLCKE"


def dni(text: str) -> bool:
    """Also an NIE, whose first letter stands for a digit."""
    number = {"X": "0", "Y": "1", "Z": "2"}.get(text[0], text[0]) + text[1:-1]
    return text[-1] == _DNI[int(number) % 23]


_ODD: Final = dict(
    zip(
        "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ",
        (
            *(1, 0, 5, 7, 9, 13, 15, 17, 19, 21, 1, 0, 5, 7, 9, 13, 15, 17, 19, 21),
            *(2, 4, 18, 20, 11, 3, 6, 8, 12, 14, 16, 10, 22, 25, 24, 23),
        ),
        strict=True,
    )
)


def codice_fiscale(text: str) -> bool:
    odd = sum(_ODD[each] for each in text[0:15:2])
    even = sum(int(each) if each.isdigit() else ord(each) - ord("A") for each in text[1:15:2])
    return (odd + even) % 26 == ord(text[15]) - ord("A")


def nir(text: str) -> bool:
    """Corsica's departments count as 19 and 18."""
    number = text[:13].replace("2A", "19").replace("2B", "18")
    return number.isdigit() and 97 - int(number) % 97 == int(text[13:])


def bsn(digits: str) -> bool:
    weights = (9, 8, 7, 6, 5, 4, 3, 2, -1)
    return digits.strip("0") != "" and sum(w * int(each) for w, each in zip(weights, digits, strict=True)) % 11 == 0


_NO_NINO: Final = ("BG", "GB", "KN", "NK", "NT", "TN", "ZZ")


def nino(text: str) -> bool:
    """It has no check digit, but prefixes that are never given."""
    first, second = text[0], text[1]
    return first not in "DFIQUV" and second not in "DFIOQUV" and text[:2] not in _NO_NINO


_D5: Final = (
    *("0123456789", "1234067895", "2340178956", "3401289567", "4012395678"),
    *("5987604321", "6598710432", "7659821043", "8765932104", "9876543210"),
)
_P: Final = (
    *("0123456789", "1576283094", "5803796142", "8916043527"),
    *("9453126870", "4286573901", "2793806415", "7046913258"),
)


def verhoeff(digits: str) -> bool:
    check = 0
    for place, digit in enumerate(reversed(digits)):
        check = int(_D5[check][int(_P[place % 8][int(digit)])])
    return check == 0


def cpf(digits: str) -> bool:
    if len(set(digits)) == 1:
        return False
    for length in (9, 10):
        total = sum((length + 1 - place) * int(digits[place]) for place in range(length))
        if total * 10 % 11 % 10 != int(digits[length]):
            return False
    return True
