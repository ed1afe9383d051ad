"""What the API reference says of answer cache and prompt log, which all APIs have alike."""

from __future__ import annotations

from typing import Final, get_args

from litestar.openapi.spec import OpenAPIHeader, OpenAPIType, Parameter, Schema

from gateway.cache.found import Outcome, Tier
from gateway.memory import CACHE_HEADER, LOG_HEADER, MAX_TTL_S, TTL_HEADER
from gateway.policies.answer_cache import RequestMode

REQUEST_HEADERS: Final = (
    Parameter(
        name=CACHE_HEADER,
        param_in="header",
        description="Of the answer cache: `off` neither looks up nor keeps; `exact` and `semantic` look up so far, at "
        "most as far as the tenant allows; `refresh` asks the model and keeps its answer.",
        schema=Schema(type=OpenAPIType.STRING, enum=get_args(RequestMode)),
    ),
    Parameter(
        name=TTL_HEADER,
        param_in="header",
        description="Keep this answer for so many seconds at most; never longer than the tenant says.",
        schema=Schema(type=OpenAPIType.INTEGER, minimum=1, maximum=MAX_TTL_S),
    ),
    Parameter(
        name=LOG_HEADER,
        param_in="header",
        description="`off` keeps this request out of the prompt log, if the tenant's policy lets it.",
        schema=Schema(type=OpenAPIType.STRING, enum=["off"]),
    ),
)
ANSWER_HEADERS: Final = {
    CACHE_HEADER: OpenAPIHeader(
        description="`exact`, `semantic`: a kept answer was given. Else the model was asked: after a `miss`; for a "
        "`refresh`; since the request is none to be kept (`bypass`); since the cache did not answer in time "
        "(`unavailable`); although there was an answer of the same meaning, of which the tenant only wants to know "
        "(`shadow_hit`, `verify`). Left out where the cache is off.",
        schema=Schema(type=OpenAPIType.STRING, enum=[*get_args(Tier), *get_args(Outcome)]),
    )
}
