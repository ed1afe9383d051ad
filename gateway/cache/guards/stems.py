"""One form for the inflections of an English word, and one spelling for British and American ones.

Plural and singular, and the forms of a verb, fall together; degrees (tall, taller, tallest), doers (employer, employee)
and derived words do not: they are other words, and other questions.
"""

from __future__ import annotations

import re
from typing import Final

from gateway.cache.guards.word_lists import words

_VOWEL: Final = re.compile("[aeiouy]")
_SHORT: Final = re.compile("[^aeiou]?[^aeiou]?[aeiou][^aeiouwxy]$")
_LINES: Final = """\
go went gone goes going
write wrote written writing
fall fell fallen
rise rose risen
take took taken
give gave given
get got gotten
make made making
eat ate eaten
drink drank drunk
begin began begun
break broke broken
speak spoke spoken
steal stole stolen
choose chose chosen choosing
drive drove driven
fly flew flown
grow grew grown
know knew known
throw threw thrown
see saw seen
say said
tell told
find found
think thought
buy bought
bring brought
catch caught
teach taught
fight fought
sell sold
hold held
keep kept
sleep slept
feel felt
leave left
lose lost losing
win won winning
build built
send sent
spend spent
lend lent
bend bent
meet met
pay paid
lay laid
run ran running
swim swam swum swimming
sing sang sung
sink sank sunk
ring rang rung
sit sat sitting
stand stood
understand understood
become became
come came coming
wear wore worn
tear tore torn
bear bore born
freeze froze frozen freezing
hide hid hidden hiding
bite bit bitten
ride rode ridden
shake shook shaken
draw drew drawn
dig dug digging
hang hung
stick stuck
shoot shot
strike struck
learn learnt
burn burnt
dream dreamt
spell spelt
light lit
lead led
feed fed
read reading
breed bred
mean meant meaning
deal dealt
hear heard
forget forgot forgotten
die dies died dying
lie lies lied lying
tie ties tied tying
child children
man men
woman women
mouse mice
tooth teeth
goose geese
life lives
knife knives
wife wives
leaf leaves
half halves
shelf shelves
loaf loaves
wolf wolves
analysis analyses
crisis crises
bacterium bacteria
criterion criteria
phenomenon phenomena
vertex vertices
index indices indexes
matrix matrices
octopus octopuses octopi
cactus cacti cactuses
potato potatoes
tomato tomatoes
hero heroes
city cities
try tries tried trying
cry cries cried crying
dry dries dried drying
sky skies
undo undid undone undoing
redo redid redone redoing
use used uses using"""
IRREGULAR: Final = {form: line.split()[0] for line in _LINES.splitlines() for form in line.split()[1:]}
for _shared in ("found", "left", "saw", "bit", "lives", "leaves", "lies"):
    IRREGULAR.pop(_shared)
PAST: Final = frozenset(form for line in _LINES.partition("\nread ")[0].splitlines() for form in line.split()[1:2])
"""Past forms that show no -ed."""
_KEPT: Final = words(
    """news physics mathematics politics economics athletics species series lens gas bus plus this his was is us as
    always perhaps sometimes across less unless basis tennis chess paris texas james jesus alps andes species means
    family apply reply supply italy july only fly assembly multiply early ally rely belly jelly bully fully daily
    weekly monthly hourly yearly likely friendly lovely lonely silly ugly holy hardly nearly lately barely scarcely
    thing king ring string spring wing bring sing sting sling swing during morning evening nothing something
    anything everything ceiling wedding pudding building bed red need seed feed speed breed weed bleed hundred
    sacred naked wicked hatred shed led fed wed sled boss address access process success glasses customs arms goods
    damages savings clothes manners woods ashes grounds spirits premises remains earnings proceeds headquarters
    marketing engineering accounting housing clothing lighting banking parking warning meeting dressing rating
    setting bearing coating hearing nursing recording shipping boxing icing spelling plumbing mining outing offering
    belonging greeting swelling blessing flooring sibling pricing shortly highly lively costly elderly fairly mostly
    largely deadly orderly"""
)
_FINAL_E: Final = words(
    """plane paste stare scare spare stripe state globe tense please corpse morale finale locale rationale humane
    urbane heroine"""
)
"""Words that would be another one without their last letter."""
_SPELLINGS: Final = (
    (re.compile("(?<=[a-z]{3})is(e|ed|es|ing|ation|ations|er|ers)$"), r"iz\1"),
    (re.compile("(?<=[a-z]{2})lys(e|ed|es|ing)$"), r"lyz\1"),
    (re.compile("(?<=[bdhilmnpv])our(s|ed|ing|ful|ite|ites|able|al|hood)?$"), r"or\1"),
    (re.compile("(cent|met|lit|theat|fib|spect|calib|somb|lust)re(s?)$"), r"\1er\2"),
    (re.compile("([aeiou])ll(ed|ing|er|ers)$"), r"\1l\2"),
    (re.compile("(dial|catal|anal|monol|prol|epil)ogue(s?)$"), r"\1og\2"),
    (re.compile("^(an|leuk|pa|h|arch|encyclop)ae(?=[a-z]{3})"), r"\1e"),
    (re.compile("^(f|diarrh)oe(?=t|a)"), r"\1e"),
)
_NOT_IZE: Final = words(
    """rise raise noise exercise promise surprise advertise advise revise supervise disguise otherwise likewise
    expertise enterprise franchise merchandise paradise praise precise premise televise treatise wise cruise bruise
    disease please increase decrease release purchase improvise compromise devise despise comprise concise arise
    poise appraise liaise tortoise porpoise chemise demise excise circumcise our hour four pour tour your sour flour
    devour velour glamour contour paramour detour"""
)


def spelling(word: str) -> str:
    """The American spelling, by rule; a word that has but one stays."""
    if word in _NOT_IZE or word.rstrip("sd") in _NOT_IZE or (word.endswith("ing") and word[:-3] + "e" in _NOT_IZE):
        return word
    for pattern, replacement in _SPELLINGS:
        word = pattern.sub(replacement, word)
    return word


def stem(word: str) -> str:
    """What an English word in lower case and its inflections share. Idempotent enough to compare by, no dictionary
    form."""
    word = spelling(word)
    if word in IRREGULAR:
        word = IRREGULAR[word]
    elif word not in _KEPT and len(word) > 3:
        word = _without_ending(word)
    return _ending(word)


def _without_ending(word: str) -> str:
    if word.endswith("ies"):
        return word[:-1]
    if word.endswith(("sses", "shes", "ches", "xes", "zes", "oes")):
        return word[:-2]
    if word.endswith("s"):
        return word if word.endswith(("ss", "us", "is")) else word[:-1]
    if word.endswith("ied"):
        return word[:-3] + "y"
    for ending in ("ing", "ed"):
        base = word[: -len(ending)]
        if word.endswith(ending) and not word.endswith("eed") and len(base) > 1 and _VOWEL.search(base):
            return _base(base)
    if word.endswith("ly") and len(word) > 5:
        return word[:-3] + "y" if word.endswith("ily") else word[:-2]
    return word


def _base(base: str) -> str:
    """The verb whose -ing or -ed is cut off."""
    if len(base) > 3 and base[-1] == base[-2] and base[-1] not in "lsz":
        return base[:-1]
    if len(base) <= 4 and _SHORT.fullmatch(base):
        return base + "e"
    return base


def _ending(word: str) -> str:
    if len(word) > 3 and word.endswith(("ie", "y")) and word[-2:] not in ("ay", "ey", "oy", "uy"):
        return word.removesuffix("ie").removesuffix("y") + "i"
    if len(word) > 4 and word.endswith("ll"):
        return word[:-1]
    return word[:-1] if len(word) > 4 and word.endswith("e") and word not in _FINAL_E else word
