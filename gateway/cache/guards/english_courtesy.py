"""What stands around an English question and asks for nothing: greetings, thanks, "could you please tell me".

Texts here are lower-case tokens with one space between them, contractions undone, " , " for any stop inside.
"""

from __future__ import annotations

import re
from typing import Final

_YOU: Final = "(?:can|could|would|will|may|might) (?:you|we|someone|anyone|anybody|somebody)"
_SAY: Final = "(?:tell|show|teach|explain|describe|let|help|give)"
WH: Final = "(?:what|who|whom|whose|where|when|why|how|which|whether|if)"
AUX: Final = "(?:is|are|was|were|am|do|does|did|can|could|should|would|will|may|might|must|has|have|had|shall)"
_BEFORE: Final = re.compile(
    "^(?:"
    + "|".join(
        (
            "[, ]+",
            "(?:hi|hello|hey|hiya|greetings|dear|good (?:morning|afternoon|evening|day))(?: there| all| everyone"
            "| team| "
            "friend| assistant| again)?\\b(?! world)(?= ?,| (?:can|could|would|i|please|what|how|why|who|where"
            "|when|tell))",
            "(?:ok|okay|so|well|um|uh|hmm|basically|actually|honestly|now|right|alright|anyway|and|but|then|also"
            "|just|please"
            "|kindly|pls|plz|thanks|thank you|sorry|excuse me|quick question|simple question|question|one question"
            "|just curious|curious|just wondering|out of curiosity|by the way|btw|for my own curiosity|i am curious"
            "|i have a (?:quick |small )?question|sorry to bother you|if you do not mind)(?= ?,| \\w)",
            f"i (?:was|am|have been|have always|always) (?:just )?(?:wondering|wondered|curious)(?: about| to "
            f"know)?(?= ?,| {WH}\\b)",
            f"i wonder(?= {WH})",
            f"(?:do|does) (?:you|anyone|anybody|someone)(?: happen to)? know(?= (?:{WH}|the)\\b)",
            "(?:any (?:idea|ideas|clue|tips on|advice on|thoughts on))(?= (?:what|who|where|when|why|how)\\b)",
            f"i (?:would (?:really )?(?:like|love)|want|need|wish|am (?:trying|looking|hoping))(?: you)? to (?:know|"
            f"understand|find out|learn|figure out|hear)(?= (?:{WH}|about|the)\\b)",
            "i (?:would (?:really )?(?:like|love|appreciate)(?: it)?|want|need)(?: for)? (?:you to|if you "
            "(?:could|would|can))",
            f"{_YOU}(?: please| kindly| possibly| maybe| perhaps| quickly)*(?= (?:please )?(?:help me|{_SAY}"
            f"|write|list|name|"
            "suggest|recommend|summarize|summarise|translate|provide|share|define|draft|create|make|compare|convert|"
            "calculate|solve|correct|fix|rewrite|generate|outline|find|check|proofread|compose|walk|point|advise"
            "|be|elaborate|"
            "clarify|go over|break down|say|state|specify|identify|design|draw|plan|prepare|come up|paraphrase|edit))",
            "would you mind(?= \\w+ing)",
            "i (?:need|want|would like) (?:some |your )?help (?:with |in )?(?=\\w+ing )",
            "would you be (?:so kind as|able|willing) to|be (?:so kind as|able) to|is there any chance you "
            "(?:can|could)",
            "(?:please )?help me (?:to )?(?:please )?(?:understand|figure out|find out|learn|know)(?= (?:how|why"
            "|what|who|where|when))",
            "(?:please )?help me (?:to )?(?=(?:write|draft|create|make|translate|compose|plan|find|fix|solve"
            "|choose|prepare)\\b)",
            f"(?:please )?(?:tell|show|teach)(?: to)? (?:me|us)(?: please| again| exactly| ,)*(?= {WH}\\b)",
            f"(?:please )?(?:explain|describe|clarify|let me know|show|say|specify)(?: to me| to us| for me)?(?: "
            f"please| exactly| ,)*"
            f"(?= {WH}\\b)",
            "(?:please )?(?:walk me through|guide me through|take me through)(?= how\\b)",
        )
    )
    + ") ?"
)
_AFTER: Final = re.compile(
    "(?: ?,)?(?: |^)(?:please|pls|plz|thanks|thank you|thanks a lot|thank you very much|thanks in advance|thank "
    "you in advance|cheers|"
    "for me|for us|to me|to us|if you (?:can|could|would|do not mind)|if possible|if that is ok|, right|anyway"
    "|many thanks)[ ,]*$"
)
_GERUND: Final = re.compile("^(\\w+?)(?:ing)(?= )")


def strip(text: str) -> str:
    """Without greetings, thanks and courtesies around the question."""
    for _ in range(12):
        shorter = _AFTER.sub("", _BEFORE.sub("", text, count=1), count=1).strip(" ,")
        if not shorter or shorter == text:
            break
        if text.startswith(("would you mind", "i need", "i want", "i would like")):
            shorter = _GERUND.sub(_verb, shorter)
        text = shorter
    return text


def _verb(found: re.Match[str]) -> str:
    base = found.group(1)
    return base[:-1] if len(base) > 3 and base[-1] == base[-2] and base[-1] not in "ls" else base
