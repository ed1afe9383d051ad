"""What the API reference says of ``POST /v1/responses``, whose body Litestar does not see."""

from __future__ import annotations

from litestar.openapi.spec import OpenAPIType, Schema

from gateway.http.openai.reference import ChatOperation

_STRING = Schema(type=OpenAPIType.STRING)
_OBJECT = Schema(type=OpenAPIType.OBJECT)


class ResponseOperation(ChatOperation):
    body = Schema(
        type=OpenAPIType.OBJECT,
        required=["model"],
        description="Told to the backend as a chat completion. Fields that are not listed here are passed on to it.",
        properties={
            "model": Schema(type=OpenAPIType.STRING, description="A name that `GET /v1/models` lists."),
            "input": Schema(
                one_of=[_STRING, Schema(type=OpenAPIType.ARRAY, items=_OBJECT)],
                description="A text, or items: messages, `function_call`, `function_call_output`.",
            ),
            "instructions": Schema(type=OpenAPIType.STRING, description="Not inherited by later responses."),
            "previous_response_id": Schema(type=OpenAPIType.STRING, description="A stored response to build upon."),
            "store": Schema(type=OpenAPIType.BOOLEAN, default=True),
            "stream": Schema(type=OpenAPIType.BOOLEAN, default=False),
            "max_output_tokens": Schema(
                type=OpenAPIType.INTEGER, minimum=1, description="The route's default, if left out."
            ),
            "tools": Schema(type=OpenAPIType.ARRAY, items=_OBJECT, description="Of the type `function` alone."),
            "tool_choice": Schema(one_of=[_STRING, _OBJECT]),
            "parallel_tool_calls": Schema(type=OpenAPIType.BOOLEAN),
            "text": Schema(type=OpenAPIType.OBJECT, description="`format` (`text`, `json_schema`, `json_object`)."),
            "reasoning": Schema(type=OpenAPIType.OBJECT, description="`effort`."),
            "temperature": Schema(type=OpenAPIType.NUMBER, minimum=0, maximum=2, default=1),
            "top_p": Schema(type=OpenAPIType.NUMBER, minimum=0, maximum=1, default=1),
            "include": Schema(type=OpenAPIType.ARRAY, items=_STRING, description="`message.output_text.logprobs`."),
            "top_logprobs": Schema(type=OpenAPIType.INTEGER, minimum=0, maximum=20),
            "metadata": Schema(type=OpenAPIType.OBJECT, description="At most 16 pairs of short texts."),
            "user": Schema(type=OpenAPIType.STRING, max_length=512, description="Your own user."),
            "safety_identifier": Schema(
                type=OpenAPIType.STRING, max_length=512, description="The newer name of `user`; it wins over the older."
            ),
        },
        examples=[{"model": "smollm2-135m-instruct", "input": "What is the capital of France?", "stream": True}],
    )
    answer = (
        "A `response`; with `stream`, events that end with `response.completed` or `response.incomplete`. An error in "
        "mid-stream is an `error` event, and nothing follows."
    )
