"""The chat template of a tokenizer, by which messages become a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

from attnzoo.data.tokenizer import SETTINGS, special_name
from attnzoo.files import json_object
from attnzoo.trained.serving.asked import FieldError

TEMPLATE = "chat_template.jinja"


def chat_template(files: Mapping[str, bytes]) -> Callable[[list[dict[str, str]]], str] | None:
    """The function from messages to a prompt's text that a tokenizer's files describe; None where they have none.

    Templates are Jinja, run in its sandbox with the settings and names that transformers gives them.

    Raises:
        ValueError: a template that cannot be read.
    """
    text = files[TEMPLATE].decode() if TEMPLATE in files else None
    if text is None:
        text = json_object(files.get(SETTINGS, b"{}"), SETTINGS).get("chat_template")
    if isinstance(text, list):  # several by name
        named = {one.get("name"): one.get("template") for one in text if isinstance(one, dict)}
        text = named.get("default")
    if not isinstance(text, str):
        return None
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    special = {f"{kind}_token": special_name(files, f"{kind}_token") or "" for kind in ("bos", "eos", "pad")}
    try:
        template = environment.from_string(text)
    except TemplateError as error:
        raise ValueError(f"chat template: expected Jinja, got {error}") from error

    def prompt(messages: list[dict[str, str]]) -> str:
        try:
            return template.render(messages=messages, add_generation_prompt=True, **special)
        except (TemplateError, TypeError, ValueError) as error:
            raise FieldError("messages", f"the chat template refuses them: {error}") from error

    return prompt
