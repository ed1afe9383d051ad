"""``POST /v1/chat/completions``."""

from __future__ import annotations

from functools import partial

from gateway.ask import Ask
from gateway.http.inference import Reference
from gateway.http.openai.ask import parse_chat
from gateway.http.openai.door import OpenAIDoor
from gateway.http.openai.fields import END_USER_HEADER, TAGS_HEADER
from gateway.http.openai.reference import ChatOperation
from gateway.long_work import is_short, worked
from gateway.tenants.principal import Principal

CHAT = Reference("/v1/chat/completions", ChatOperation, "createChatCompletion", "Create a chat completion", "Chat")


class ChatDoor(OpenAIDoor):
    async def ask(self, raw: bytes, principal: Principal) -> Ask:
        end_user, tags = self.client.text(END_USER_HEADER), self.client.text(TAGS_HEADER)
        if is_short(len(raw)):
            return parse_chat(raw, end_user=end_user, tags=tags)
        return await worked(len(raw), partial(parse_chat, raw, end_user=end_user, tags=tags))
