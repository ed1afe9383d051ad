"""English words by what they do in a question. A word that stands in no list counts as content, and must match."""

from __future__ import annotations

from typing import Final

from gateway.cache.guards.word_lists import in_order, words

LIGHT: Final = words(
    """a an the of in on at for with by to about as be is are was were been being am do does did done have has had
    having it its this that these those there here who whom whose what which where when why how and but so also too
    than i me my mine myself you your yours yourself we us our ours he him his she her hers they them their theirs one
    can could shall should will would may might must ought let lets s t
    any some such own really actually exactly basically just quite very extremely truly literally definitely exist
    exists please kindly ever thing things
    something anything somebody someone anybody anyone oneself via using between among
    regarding concerning located situated because while into onto within through per"""
)
"""Words that no answer hangs on by themselves; order, persons, modals and the kind of question count apart."""

ARTICLES: Final = words("a an the my your our his her their its this that these those some any")
TIES: Final = {
    word: tie
    for tie, group in {
        "of": "of",
        "in": "in at within",
        "on": "on",
        "about": "about regarding concerning",
        "for": "for",
        "between": "between among",
        "tool": "with using via through",
        "goal": "to into onto",
        "by": "by",
        "than": "than",
        "as": "as",
    }.items()
    for word in group.split()
}
"""Prepositions -> how they tie a phrase to its sentence. Those that point somewhere (from, before) are content."""
MOVABLE: Final = words("of in on about for between tool poss")
"""Ties whose phrases move about a sentence without changing it."""
ALIKE_TIES: Final = frozenset(
    frozenset(pair.split("-"))
    for pair in in_order(
        """of-in of-on of-about of-for of-between of-poss in-on in-poss about-on about-for in-between for-poss on-for
        by-poss"""
    )
)

BE: Final = words("is are was were am be been being")
AUXILIARY: Final = words(
    "is are was were am do does did can could shall should will would may might must have has had ought"
)
MODALS: Final = {
    "can": "can",
    "could": "can",
    "may": "may",
    "might": "may",
    "should": "should",
    "ought": "should",
    "must": "must",
    "shall": "should",
    "will": "will",
    "would": "would",
}
PAST_AUXILIARY: Final = words("was were did had")
PRESENT_AUXILIARY: Final = words("is are am do does has have")

NEGATION: Final = words(
    """not no never without except excluding neither nor none nothing nobody nowhere cannot hardly barely scarcely
    lack lacks lacking absent unless non rarely seldom fail fails
    failed exclude excludes"""
)
NEGATING_PREFIXES: Final = ("un", "in", "im", "ir", "il", "non", "dis", "ab", "a", "de", "mis", "anti", "counter")

DIRECTION: Final = words(
    """before after until till since from toward towards above over below under beneath against off up down out outside
    inside away back forward backward across along around behind beyond past left right north south east west northern
    southern eastern western top bottom upper lower front rear upward downward clockwise counterclockwise anticlockwise
    ascending descending horizontal vertical more less most least fewer fewest greater greatest higher highest lowest
    better best worse worst bigger biggest larger largest smaller smallest longer longest shorter shortest faster
    fastest slower slowest older oldest younger youngest newer newest earlier earliest later latest cheaper cheapest
    taller tallest minimum maximum min max increase decrease raise lower rise fall grow shrink gain lose buy sell import
    export encode decode encrypt decrypt upload download install uninstall open close lock unlock add remove insert
    delete push pull send receive give take win beat defeat start stop begin end enable disable show hide connect
    disconnect compress decompress zip unzip expand collapse borrow lend hire fire enter exit arrive depart join split
    merge accept reject allow forbid advantage disadvantage positive negative first last same different only all every
    both each always sometimes most many few or either if"""
)
"""Words whose exchange turns a question round: named apart in what is told of a miss, and compared like all content."""

DAYS: Final = {
    short: day
    for day in ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
    for short in (day, day + "s", day[:3])
} | {"tues": "tuesday", "thur": "thursday", "thurs": "thursday"}
for _ambiguous in ("sun", "sat", "wed"):
    DAYS.pop(_ambiguous)
MONTHS: Final = (
    {
        short: month
        for month in (
            "january february march april may june july august september october november december".split()  # noqa: SIM905
        )
        for short in (month, month[:3])
        if short not in ("may", "mar")
    }
    | {"sept": "september"}
)
NOW: Final = words(
    """today todays tonight tomorrow yesterday now nowadays currently current latest recent recently upcoming present
    presently newest lately ago breaking live yet still"""
)
TIME: Final = (
    NOW
    | words(
        """second seconds minute minutes hour hours day days week weeks weekend weekends month months year years decade
        decades century centuries millennium fortnight morning afternoon evening night noon midnight dawn dusk spring
        summer autumn winter season am pm bc bce ad ce daily weekly monthly yearly annual annually hourly nightly next
        previous previously soon early late"""
    )
    | frozenset(DAYS.values())
    | frozenset(MONTHS.values())
    | words("hanukkah christmas easter ramadan halloween thanksgiving")
)

UNITS: Final = {
    form: unit
    for unit, forms in {
        "kilometre": "km kms kilometre kilometer",
        "metre": "metre meter",
        "centimetre": "cm cms centimetre centimeter",
        "millimetre": "mm millimetre millimeter",
        "mile": "mile mi",
        "inch": "inch inches",
        "foot": "foot feet ft",
        "yard": "yard yd",
        "kilogram": "kg kgs kilo kilogram kilogramme",
        "gram": "gram gramme",
        "milligram": "mg milligram",
        "microgram": "mcg microgram",
        "lb": "lb lbs",
        "ounce": "oz ounce",
        "ton": "ton",
        "tonne": "tonne",
        "litre": "litre liter",
        "millilitre": "ml millilitre milliliter",
        "gallon": "gallon gal",
        "pint": "pint",
        "quart": "quart",
        "cup": "cup",
        "tablespoon": "tbsp tablespoon",
        "teaspoon": "tsp teaspoon",
        "celsius": "celsius centigrade",
        "fahrenheit": "fahrenheit",
        "kelvin": "kelvin",
        "mph": "mph",
        "kph": "kph kmh",
        "acre": "acre",
        "hectare": "hectare",
        "watt": "watt",
        "kilowatt": "kw kilowatt",
        "volt": "volt",
        "amp": "amp ampere",
        "joule": "joule",
        "calorie": "calorie kcal",
        "byte": "byte",
        "kilobyte": "kb kilobyte",
        "megabyte": "mb megabyte",
        "gigabyte": "gb gigabyte",
        "terabyte": "tb terabyte",
        "bit": "bit",
        "percent": "percent percentage",
        "degree": "degree",
        "hertz": "hz hertz",
        "nanometre": "nm nanometre nanometer",
        "millisecond": "ms millisecond",
    }.items()
    for word in forms.split()
    for form in ((word, word + "s") if len(word) > 3 and not word.endswith("s") else (word,))
}
CURRENCIES: Final = {
    form: currency
    for currency, forms in {
        "dollar": "$ usd dollar dollars buck bucks",
        "euro": "€ eur euro euros",
        "gbp": "£ gbp sterling quid",
        "yen": "¥ jpy yen",
        "rupee": "₹ inr rupee rupees",
        "yuan": "cny rmb yuan renminbi",
        "pound": "pound pounds",
        "franc": "chf franc francs",
        "won": "₩ krw",
        "peso": "mxn peso pesos",
        "cent": "¢ cent cents",
        "ruble": "₽ rub ruble rubles rouble roubles",
        "real": "brl reais",
        "krona": "sek krona kronor nok dkk krone kroner",
        "zloty": "pln zloty",
        "lira": "₺ lira liras",
        "cad": "cad",
        "aud": "aud",
        "bitcoin": "btc bitcoin bitcoins",
    }.items()
    for form in forms.split()
}
LANGUAGES: Final = words(
    """english french german spanish italian portuguese dutch polish russian chinese mandarin cantonese japanese korean
    arabic hebrew hindi urdu bengali turkish greek latin swedish norwegian danish finnish icelandic czech slovak
    hungarian romanian bulgarian serbian croatian ukrainian vietnamese thai indonesian malay tagalog swahili persian
    farsi catalan basque galician irish welsh esperanto deutsch englisch französisch spanisch italienisch
    anglais français francais allemand espagnol italien inglés ingles francés frances alemán aleman español espanol
    italiano inglese francese tedesco spagnolo inglês francês alemão espanhol engels frans duits spaans"""
)
FORM: Final = words(
    """short brief briefly concise concisely detail details detailed depth long lengthy sentence sentences word words
    paragraph paragraphs page pages bullet bullets table list json xml yaml csv html markdown essay poem haiku limerick
    song story email letter tweet speech script code regex diagram chart graph outline summary formal informal casual
    formally funny serious professional technical simple simply layman beginner expert child kid step steps example
    examples one-liner rhyme tone style format plain abstract headline title slogan blog article report"""
)
