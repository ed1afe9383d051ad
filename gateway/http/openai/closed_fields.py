"""Fields that are not passed on, though what is unknown here is: some backend would obey them, and make more than was
reserved, ask another model, or do what is the operator's to say.

Sources: llama.cpp's server lets ``n_predict`` win over ``max_tokens``; https://openrouter.ai/docs/api-reference and
https://docs.litellm.ai/docs/proxy/reliability name other models to turn to; SGLang's and vLLM's protocol modules name
adapters, priorities and peers. Ollama reads JSON as Go does, which takes ``MODEL`` for ``model``:
https://pkg.go.dev/encoding/json#Unmarshal.
"""

from __future__ import annotations

from typing import Final

from gateway.ask import Body, given
from worker.protocol.errors import bad_request

_OUTPUT: Final = {"n_predict": "max_tokens", "max_new_tokens": "max_tokens", "num_predict": "max_tokens", "n_cmpl": "n"}
"""By what says the same, and is reserved for."""
_CLOSED: Final = frozenset(
    (
        *("models", "fallbacks", "route", "provider", "plugins"),
        *("lora", "lora_path", "lora_request", "prompt_adapter_request"),
        *("priority", "rid", "id_slot", "data_parallel_rank", "custom_logit_processor"),
        *("kv_transfer_params", "disaggregated_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"),
    )
)
_REFUSED: Final = _CLOSED | _OUTPUT.keys()
_SPELLED: Final = _REFUSED | frozenset(
    (
        *("model", "messages", "prompt", "input", "system", "instructions", "suffix", "tools", "functions"),
        *("n", "best_of", "max_tokens", "max_completion_tokens", "max_output_tokens", "stream", "stream_options"),
    )
)
"""What must not come by another spelling of its name."""


def check_fields(body: Body) -> None:
    """Raises ApiError (400)."""
    for field in body:
        if not (field.isascii() and field.islower()) and (meant := field.casefold()) in _SPELLED and meant != field:
            raise bad_request(f"Unknown parameter: {field!r}. Spell it {meant!r}.", param=field)
    for field in _REFUSED & body.keys():
        if given(body, field):
            instead = f"Use '{_OUTPUT[field]}'" if field in _OUTPUT else "Leave it out"
            raise bad_request(
                f"Unsupported parameter: '{field}'. {instead}.", param=field, code="unsupported_parameter"
            )
