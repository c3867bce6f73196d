"""Chat templates: messages become the text that a checkpoint was trained to see.

A checkpoint brings its template along, written in Jinja for the names and the white-space rules
that transformers renders it with; they are given here. A template is foreign code: it runs in
Jinja's sandbox, where it reaches nothing but its variables.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]  # {"role": "user", "content": "..."} and what else a template reads


def render(template: str, messages: Sequence[Message], **variables: object) -> str:
    """The text of `messages`, up to where the assistant's answer begins.

    `variables` are further names that the template may read, such as enable_thinking=False.

    Raises:
      ValueError: the template is malformed, or refuses these messages.
    """
    names = {"add_generation_prompt": True, "tools": None, "documents": None} | variables
    try:
        return _compiled(template).render(messages=[dict(m) for m in messages], **names)
    except jinja2.TemplateError as error:
        raise ValueError(
            f"the chat template refuses these messages: {error}; roles given: "
            f"{[m.get('role') for m in messages]}"
        ) from error


@functools.cache
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
    return environment.from_string(template)


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}`: marks an assistant's words, changes nothing."""

    tags = frozenset({"generation"})

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: object, ensure_ascii: bool = False, **options: object) -> str:
    """JSON as it is; Jinja's own filter would write '<' as \\u003c, for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
