"""What an English question asks for, and what is left of it without the words that ask.

Texts here are lower-case tokens with one space between them, contractions undone, " , " for any stop inside.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from gateway.cache.guards import english
from gateway.cache.guards.english_courtesy import AUX, WH, strip


class Ask(NamedTuple):
    kind: str
    rest: str
    text: str
    """All of it, as the kind was found in it."""
    generic: bool
    """Whether "I", "you" and nobody mean the same here: how do I, how do you, how to."""


_LEADING: Final = (
    "in|on|at|with|for|to|using|under|during|without|within|from|by|as|among|of|inside|after|before|because of"
)
_IN_FRONT: Final = re.compile(
    f"^((?:{_LEADING}) (?!{WH}\\b)[^,]{{1,60}}?)(?: , (?=(?:{WH}|{AUX}|explain|describe|list|name|give|write"
    f"|tell)\\b)"
    f"| (?=(?:what|who|where|when|why|how|which) {AUX}\\b))(.+)$"
)
_CLAUSE_IN_FRONT: Final = re.compile(
    f"^((?:if|when|while|since|because|although|once) [^,]{{1,100}}) , (?=(?:{WH}|{AUX}|explain|describe|list"
    f"|give|write)\\b)(.+)$"
)
_AT_END: Final = (
    re.compile("^(.+?) ?,? (what|who|where|when) (is|are|was|were) (?:they|it|that|he|she|those|this)$"),
    re.compile(f"^(?!{WH} |{AUX} )(.+) (is|are|was|were) (who|what|where|when|which)$"),
)
_SUBJECT: Final = "(?:i|you|we|one|people|someone|somebody|anyone|they|a person)"
_PARTICIPLE: Final = (
    "(?:\\w{2,}ed|made|written|built|done|grown|taken|sold|found|born|drawn|spoken|held|kept|eaten|given|known|worn|"
    "undone|sent|paid|won|lost|caught|taught|bought|broken|chosen|frozen|hidden|stolen|thrown|shot|struck|sung"
    "|read|cut|put|set)"
)
_JUDGEMENTS: Final = (
    "healthy|unhealthy|safe|unsafe|legal|illegal|bad|good|dangerous|harmful|okay|normal|important|hard|difficult|easy"
)
_NOUN: Final = "(?:ways?|steps?|methods?|procedures?|instructions?|guides?|techniques?|approach(?:es)?|trick|process)"
_GIVE: Final = (
    "(?:what is|what are|what would be|give me|tell me|show me|list|explain|describe|provide|share|i need|is there|"
    "are there)"
)
_DOERS: Final = {
    "author": "wrote", "writer": "wrote", "founder": "founded", "creator": "created", "inventor": "invented",
    "discoverer": "discovered", "director": "directed", "painter": "painted", "composer": "composed", "winner": "won",
    "designer": "designed", "builder": "built", "developer": "developed", "owner": "owns", "maker": "made",
}  # fmt: skip
_MEASURES: Final = {
    "tall": "height", "high": "height", "long": "length", "old": "age", "big": "size", "large": "size", "deep": "depth",
    "wide": "width", "far": "distance", "far away": "distance", "heavy": "weight", "fast": "speed",
    "hot": "temperature",
}  # fmt: skip

_REWRITES: Final[tuple[tuple[re.Pattern[str], str], ...]] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        ("^(?:in )?(?:what|which) year (?=is|was|were|did|does|will)", "when "),
        ("^(.*)(?:get|travel|go) (?=from .+ to )", r"\1go "),
        ("^(.*)make (.+?) (?:run |go |load |work )?(?:faster|quicker)$", r"\1speed up \2"),
        ("^why (?:do|does) (.+) (?:happen|occur)$", r"what causes \1"),
        ("^how (?:do|does) (.+) (?:affect|influence|impact) (.+)$", r"what are the effects of \1 on \2"),
        ("^what (is|are|was|were) (.+) like(?= in | on | at |$)", r"how \1 \2"),
        ("^what steps (?:do|should|must|can) i (?:need to |have to |must )?(?:take|follow) to ", "how to "),
        ("^how (?:does|do) (.+) function$", r"how does \1 work"),
        ("^(.*)get (.+?) (?:out of|off of|off) ", r"\1remove \2 from "),
        ("^(?:give|show|tell|find|send|write|suggest|recommend|share|what is)(?: me)? (?:a |an |the |some |your "
         ")?(?:good |best )?"
         "recipes? for ", "how to make "),
        ("^(.*convert .+ to (?:a |an )?\\w+) (?:document|file|format)$", r"\1"),
        (f"^is (\\w+ing) (.+) ({_JUDGEMENTS})$", r"is it \3 to \1 \2"),
        ("^how long (?:do|does|can) (.+) live(?: for)?$", r"what is the lifespan of \1"),
        ("^(.*)(?:turn|change|transform) (.+) into ", r"\1convert \2 to "),
        ("^what is the treatment (?:for|of) ", "how to treat "),
        ("^(?:is|are) (.+) (?:required|needed|necessary)(?= to | for | in |$)", r"do i need \1"),
        ("^what (?:could|might|would|can) be ", "what is "),
        ("^what is meant by ", "what is the meaning of "),
        ("^(what does|define|what is the meaning of) (?:the )?(?:word|term|phrase|expression|acronym"
         "|abbreviation) ", r"\1 "),
        ("^(what is|explain|describe|define) the concept of ", r"\1 "),
        ("^what is the location of ", "where is "),
        ("^(?:what|which) (\\w+(?: \\w+)?) (is|are|was|were) (?:the )?(\\w+est|(?:most|least) \\w+|best|worst)(?= |$)",
         r"what \2 the \3 \1"),
        ("^how (?:do|would|can|could|should) (?:you|i|we|one) say (.+) in (\\w+)$", r"translate \1 to \2"),
        (f"^what is (.+) in ((?:{'|'.join(sorted(english.LANGUAGES))}))$", r"translate \1 to \2"),
        ("^(?:calculate|compute|work out|evaluate) (?=the |\\d)", "what is "),
        ("^how many (\\w+) (?:is|are|are in|in|are there in|does) (\\d.*)$", r"convert \2 to \1"),
        ("^what is (\\d[\\d.,]* \\w+(?: \\w+)?) in (\\w+)$", r"convert \1 to \2"),
        ("^what (?:is|does) (?:the )?(.+) abbreviate$", r"what abbreviate \1"),
        ("^what is (?:the )?abbreviate ", "what abbreviate "),
        ("^how far (?:away )?(?:is|are) (?!it )(.+) from (.+)$", r"what is the distance between \1 and \2"),
        ("^how far is it (?=from|between)", "what is the distance "),
        ("^(.*distance) (?:of (.+) )?from (.+) to (.+)$", r"\1 between \3 and \4"),
        ("^(.*distance) of (.+) from (.+)$", r"\1 between \2 and \3"),
        ("^how (?:much (?:does|do)) (.+) weigh$", r"what is the weight of \1"),
        ("^is it (?:a good idea|advisable|wise|recommended)(?: for me)? to ", "should i "),
        ("^is it (?:necessary|required|mandatory)(?: for me)? to ", "must i "),
        ("^am i (?:required|obliged) to ", "must i "),
        ("^(?:do|does) (i|we|you|one) must ", r"must \1 "),
        ("^what (?:distinguishes|differentiates) (.+) from (.+)$", r"what is the difference between \1 and \2"),
        ("^(?:i (?:would like|need|want)|could i have) (?=a |an |some )", "give me "),
        ("^(?:create|compose|generate|draft|craft|produce|make|pen|invent|prepare)(?: me| us)? (?=(?:a|an|some"
         "|the) (?:\\w+ ){0,3}"
         "(?:poem|haiku|limerick|story|song|essay|letter|email|function|script|program|paragraph|speech|joke"
         "|tweet|caption|slogan"
         "|message|query|regex|headline|description|dialogue|note|sentence|article|post|review|riddle)\\b)", "write "),
        ("^(write|draft|create|make|suggest|recommend|find|get|send|compose)(?: me| us) ", r"\1 "),
        ("^(?:at )?(?:what|which) time (?:is it when|of day (?:does|is|do|did)|does|do|did|is|will) ", "when "),
        ("^(?:on )?(?:what|which) date (?=is|was|did|does|will)", "when "),
        ("^what is the best (?=time|day|month|season)", "when is the best "),
        ("^when (?:was|were) (.+) born$", r"what is the birthday of \1"),
        ("^how come ", "why "),
        ("^why is it that ", "why "),
        ("^(?:what (?:is|are|was|were)|tell me|explain|give me|list) (?:the |some )?(?:main )?reasons? (?:for"
         "|why|behind|that) ", "why "),
        ("^what (?:is|are|was|were) the number of ", "how many "),
        ("^how many (?:people|inhabitants|residents) (?:live|are (?:there )?living|are there|are|reside) in "
         "(.+)$", r"what is the population of \1"),
        ("^how many (?:people|inhabitants|residents) does (.+) have$", r"what is the population of \1"),
        ("^how much time (?=does|do|did|will|would|is|should)", "how long "),
        ("^how much (?:does|do) (.+) cost(?= |$)", r"what is the price of \1"),
        ("^how much is (?=(?:a|an|the) )", "what is the price of "),
        ("^what is (\\w+ )?going to ", r"what will \1"),
        ("^is it possible(?: for me)? to ", "can i "),
        ("^(?:am i|are we) able to ", "can i "),
        ("^would it be possible to ", "can i "),
        ("^what (?:does|do) (?!i |you |we |he |she |they )(.+) do (in|for) (.+)$", r"what is the function of \1 \2 \3"),
        ("^what does (.+) do$", r"what is the function of \1"),
        ("^what do (.+) do$", r"what is the function of \1"),
        ("^what is the (?:role|purpose|function|job) of ", "what is the function of "),
        ("^(?:tell me|give me|explain|describe) the (?:role|purpose|function) of ", "what is the function of "),
        ("^how (?:does|do|is|are) (.+?) (?:differ from|different from|different to|different than) "
         "(.+)$", r"what is the difference between \1 and \2"),
        ("^how (?:does|do|is|are) (.+ and .+?) (?:differ|different|different from each "
         "other)$", r"what is the difference between \1"),
        *((f"^(?:who|what is the name of the person who) (?:is|was|are|were) (?:the )?{doer} "
           f"of ", f"who {did} ") for doer, did in _DOERS.items()),
        ("^by whom (?:is|was|were) (.+) (" + _PARTICIPLE + ")$", r"who \2 \1"),
        ("^(?:give me|write|provide|make|create) (?:a |an |the )?(?:(brief|short) )?summary of ", r"summarize \1 "),
        ("^what (?:is|are) (.+) called$", r"what called \1"),
        ("^what do (?:you|we|they|people) call ", "what called "),
        ("^what (?:should|can|could|do|would) i do (?:to|if i want to) ", "how to "),
        ("^what is used to ", "how to "),
        ("^(?:how|what) about ", "what is "),
        ("^what to ", "what should i "),
        ("^(how|when|where|why) (is|are|was|were) (?!i |you |we |he |she |they |it )(.+) "
         "(" + _PARTICIPLE + ")$", r"\1 \2 \4 \3"),
        ("^(how) (?:can|could|should|may|do) (.+) be (" + _PARTICIPLE + ")$", r"\1 to \3 \2"),
        ("^(how) (?:can|could|should|may|do) (.+) be (" + _PARTICIPLE + ") (?=in|on|with|at)", r"\1 to \3 \2 "),
        (f"^(?:{_GIVE} )?(?:the |a |an |some |any |all )*(?:(?:good|best|right|proper|correct|effective) )*{_NOUN} "
         "(?:for me )?(?:(?:that |in which )?(?:i|you|we|one) can|to|for|of|on|in)(?= ) (?:how to )?", "how to "),
        ("^(?:any |some )?(?:tips?|advice|ideas|suggestions) (?:to|on how to|on how i can|for how to) ", "how to "),
        ("^(?:(?:tips?|advice) )(?:for|on) (?=\\w+ing )", "how to "),
        ("^(?:show|teach|tell) me (?:how )?to ", "how to "),
        ("^i (?:want|need|would like|am trying) to ", "how to "),
        ("^(?:walk|guide|talk) me through (?:the process of )?", "how to "),
        (f"^how (?:do|does|can|could|should|would|might|shall) {_SUBJECT} (?:best |go about |properly |correctly "
         f")?", "how to "),
        (f"^how (?:{_SUBJECT}) (?:can|could|should|may|might) (?:best )?", "how to "),
        ("^how best to ", "how to "),
    )
)  # fmt: skip
_MEASURE: Final = re.compile(f"^how ({'|'.join(sorted(_MEASURES, key=len, reverse=True))}) (is|are|am|was|were) ")
_KINDS: Final = tuple(
    (kind, re.compile(f"^(?:{pattern})(?:(?<= )| |$)"))
    for kind, pattern in (
        ("howto", "how to"),
        ("count", "how many"),
        ("amount", "how much"),
        ("howlong", "(?:for )?how long"),
        ("howoften", "how (?:often|frequently)"),
        ("howfar", "how far"),
        ("degree", "how (?=\\w+ (?:is|are|was|were|do|does|did|can|should) )"),
        ("how", "how"),
        ("why", "why"),
        ("when", "(?:since |until |from )?when"),
        ("where", "(?:from |to )?where"),
        ("whose", "whose"),
        ("who", "who|whom|which person|what person"),
        ("explain", "what (?:is|was) (?:a|an) (?!good|great|nice|suitable|healthy|example|synonym|simple)"),
        ("define", "define|(?:give me |what is |tell me )?(?:the |a )?definition of"),
        ("what", "(?:in |on |at |for |to |by |from |with |of )?(?:what|which)|tell me(?= the)"),
        ("explain", "(?:explain|describe|tell (?:me|us) about|elaborate on|clarify|talk about|discuss|about)(?: "
                    "to me| to us| for me)?(?: about)?"),
        ("name", "name(?: for me)?"),
        ("list", "(?:(?:generate|create|make|write|compile|provide) (?:me )?a list of|list|enumerate|give (?:me "
                 "|us )?a list of|provide a list of|make a list of|mention"
                 "|identify)(?: for me)?(?: all)?"),
        ("give", "(?:give|suggest|recommend|provide|share|offer|propose|tell|show|get)(?: (?:me|us|to me))?(?: with)?"),
        ("yesno", "whether|if"),
    )
)  # fmt: skip
_YES_OR_NO: Final = re.compile(f"{AUX} ")
ALIKE: Final = frozenset(
    frozenset(pair.split())
    for pair in (
        [
            "what explain",
            "what list",
            "what give",
            "what define",
            "what name",
            "explain define",
            "list give",
            "list name",
            "give name",
            "who name",
            "what do",
            "howto how",
        ]
    )
)
"""Kinds that are answered alike when all else is the same."""


def ask(text: str) -> Ask:
    """``text`` as ``strip`` leaves it."""
    for pattern in _AT_END:
        if found := pattern.match(text):
            groups = found.groups()
            text = (
                f"{groups[1]} {groups[2]} {groups[0]}"
                if groups[1] not in _BE
                else f"{groups[2]} {groups[1]} {groups[0]}"
            )
    if found := _IN_FRONT.match(text) or _CLAUSE_IN_FRONT.match(text):
        text = f"{found.group(2).strip(' ,')} {found.group(1)}"
        text = strip(text)
    if found := _MEASURE.match(text):
        text = f"what {found.group(2)} the {_MEASURES[found.group(1)]} of {text[found.end() :]}"
    generic = False
    for pattern, replacement in _REWRITES:
        if pattern.match(text):
            text = pattern.sub(replacement, text, count=1).strip()
    for kind, pattern in _KINDS:
        if found := pattern.match(text):
            generic = kind == "howto"
            return Ask(kind, text[found.end() :].strip(), text, generic)
    return Ask("yesno" if _YES_OR_NO.match(text) else "do", text, text, generic)


_BE: Final = frozenset(("is", "are", "was", "were"))
