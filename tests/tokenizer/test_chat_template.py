"""Chat templates: rendered as transformers renders them, on messages made plain, with errors fit for a client."""

import itertools

import pytest

from minisgl.errors import RequestError
from minisgl.tokenizer.chat_template import ChatTemplate, plain_messages
from tests.tokenizer import fakes

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TRIMMED = """{{ bos_token }}
{%- for m in messages %}
    {% if loop.first %}
        <first>
    {% endif %}
    {{- m.content | trim }}
    {%- if m.content == 'stop' %}{% break %}{% endif %}
  {% continue %}
    never
{% endfor %}
{% if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}
{% if not documents %}none{% endif %}
"""
NAMESPACED = """{%- set ns = namespace(n=0, last='') -%}
{%- macro show(m) -%}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}
{%- else %}<{{ m.role }}>{{ m.content }}{% endif %}{%- endmacro -%}
{%- for m in messages -%}{%- set ns.n = ns.n + 1 -%}{{ show(m) }}{%- for call in m.tool_calls or [] -%}
{{ call.function.name }}({{ call.function.arguments | tojson }}){%- endfor -%}{%- endfor -%}
{{ ns.n }}{{ undefined_name }}{{ "<&>'é" | tojson }}{{ messages[-1].content.split(' ')[0] | upper }}"""
YEAR = "{{ strftime_now('%Y-%m-%d') }}{{ mood | default('calm') }}"

CHATS = [
    [{"role": "user", "content": "Hi there"}],
    [{"role": "system", "content": " be brief "}, {"role": "user", "content": "stop"}, {"role": "assistant", "content": "a & b"}],
    [
        {"role": "user", "content": "Wetter in Köln?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"ort": "Köln"}}}]},
        {"role": "tool", "content": "Sunny 世"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"ort": "<str>"}}}]


def render(source, messages, special_tokens=None, add_generation_prompt=True, **variables):
    template = ChatTemplate({"default": source}, "here")
    return template.render(messages, add_generation_prompt=add_generation_prompt, special_tokens=special_tokens or {}, variables=variables)


@pytest.mark.parametrize(("source", "chat"), list(itertools.product([CHATML, TRIMMED, NAMESPACED, YEAR], range(len(CHATS)))))
def test_rendering_equals_transformers(source, chat):
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(tokenizer_object=fakes.byte_level(), bos_token="<|end|>", chat_template=source)
    tools = TOOLS if source == TRIMMED else None
    if source != NAMESPACED and chat == 2:
        messages = [{key: value for key, value in message.items() if key != "tool_calls"} for message in CHATS[chat]]
    else:
        messages = CHATS[chat]
    for prompts in (True, False):
        expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompts, tools=tools, mood="warm")
        extra = {"tools": tools} if tools else {}
        assert render(source, messages, {"bos_token": "<|end|>"}, prompts, mood="warm", **extra) == expected


LLAMA_LIKE = (
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\n' + system + '<|eot_id|>' }}"
    "{%- for m in messages %}{%- if m.role not in ('user', 'assistant', 'tool') %}{{ raise_exception('Unknown role: ' + m.role) }}"
    "{%- endif %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
)
HARMONY_LIKE = (
    "{%- if messages[0].role == 'developer' or messages[0].role == 'system' %}{%- set words = messages[0].content %}"
    "{{ '<|start|>developer<|message|># Instructions\n\n' + words + '<|end|>' }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}ok"


def developer_chat(role="developer"):
    return [{"role": role, "content": "Be brief."}, {"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("source", [CHATML, LLAMA_LIKE, NAMESPACED])
def test_a_template_that_does_not_know_developers_gets_them_as_system(source):
    assert render(source, developer_chat()) == render(source, developer_chat("system"))
    assert "developer" not in render(source, developer_chat())


def test_a_template_that_knows_developers_gets_them_as_they_are():
    text = render(HARMONY_LIKE, developer_chat())
    assert text == "<|start|>developer<|message|># Instructions\n\nBe brief.<|end|><|start|>user<|message|>Hi<|end|>"
    assert render("{{ messages[0].role }} {# developer #}", developer_chat()) == "developer "


def test_a_template_without_a_system_role_refuses_developers_in_its_words():
    with pytest.raises(RequestError, match="System role not supported"):
        render(NO_SYSTEM, developer_chat())


def test_a_developer_among_the_turns_is_refused_by_a_template_that_allows_system_first_only():
    with pytest.raises(RequestError, match="Unknown role: system"):
        render(LLAMA_LIKE, [*developer_chat(), {"role": "developer", "content": "Be briefer."}])


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "ab"
    assert render("[{{ messages[0].content }}]", [{"role": "user", "content": []}]) == "[]"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "image", None, 3])
def test_parts_other_than_text_are_refused_by_kind(kind):
    parts = [{"type": "text", "text": "a"}, {"type": kind, "image_url": {"url": "x"}}]
    with pytest.raises(RequestError, match=r"messages\[0\]\.content\[1\].*only text parts") as caught:
        render(CHATML, [{"role": "user", "content": parts}])
    assert repr(kind) in str(caught.value)


@pytest.mark.parametrize(
    "message", [{"role": "assistant", "content": None}, {"role": "assistant"}, {"role": "assistant", "content": None, "tool_calls": None}]
)
def test_null_or_missing_content_never_prints_none(message):
    text = render(
        CHATML, [{"role": "user", "content": "a"}, message, {"role": "tool", "tool_call_id": "c1", "name": None, "content": "Sunny"}]
    )
    assert "None" not in text
    assert "<|im_start|>assistant\n<|im_end|>" in text
    assert "Sunny" in text


def test_a_replayed_tool_turn_reaches_a_template_that_knows_tools():
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    chat = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "Sunny"},
    ]
    text = render(NAMESPACED, chat)
    assert 'weather({"city": "Rome"})' in text
    assert "None" not in text


def test_a_tool_turn_is_refused_by_a_template_that_knows_none():
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    with pytest.raises(RequestError, match="tools are unsupported") as caught:
        render(CHATML, [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}])
    assert caught.value.code == "tools_unsupported"
    with pytest.raises(RequestError, match="no place for them"):
        render(CHATML, CHATS[0], tools=TOOLS)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "an empty list"),
        (["x"], r"messages\[0\]: an object"),
        ([{"content": "x"}], r"messages\[0\]: an object with a string `role`"),
        ([{"role": 3, "content": "x"}], "string `role`"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content: int"),
        ([{"role": "user", "content": {"type": "text"}}], r"content: dict"),
        ([{"role": "user", "content": ["x"]}], "only text parts"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "a string is wanted"),
        ([{"role": "user", "content": "x", "tool_calls": [1]}], "object `function`"),
        ([{"role": "user", "content": "x", "tool_calls": 1}], "tool_calls: a list"),
    ],
)
def test_malformed_messages_are_refused(messages, words):
    with pytest.raises(RequestError, match=words) as caught:
        plain_messages(messages)
    assert caught.value.param == "messages"


def test_a_template_that_raises_gives_its_own_words():
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('roles must alternate, user first') }}{% endif %}ok"
    assert render(source, CHATS[0]) == "ok"
    with pytest.raises(RequestError, match="roles must alternate, user first") as caught:
        render(source, CHATS[1])
    assert (caught.value.status, caught.value.code) == (400, "chat_template_error")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].nothing.more }}",
        "{{ 'a' + 3 }}",
        "{{ 1 / 0 }}",
        "{{ {}['k']['l'] }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ x.y.z }}",
    ],
)
def test_whatever_a_template_does_wrong_is_a_client_error(source):
    with pytest.raises(RequestError, match="cannot render these messages"):
        render(source, CHATS[0])


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "chat_template", "tokenize", "bos_token"])
def test_variables_cannot_replace_what_the_server_sets(name):
    template = ChatTemplate({"default": CHATML}, "here")
    with pytest.raises(RequestError, match=name):
        template.render(CHATS[0], add_generation_prompt=True, special_tokens={"bos_token": "<s>"}, variables={name: "x"})


@pytest.mark.parametrize("name", ["messages", "self"])
def test_variables_named_like_python_arguments_are_refused_not_crashed(name):
    tokenizer = fakes.ours(fakes.byte_level(), chat_template=ChatTemplate({"default": CHATML}, "here"))
    with pytest.raises(RequestError, match=f"chat_template_kwargs: '{name}'"):
        tokenizer.apply_chat_template(CHATS[0], **{name: 1})


def test_the_generation_prompt_can_be_left_out_by_a_variable():
    tokenizer = fakes.ours(fakes.byte_level(), chat_template=ChatTemplate({"default": CHATML}, "here"))
    assert tokenizer.render_chat(CHATS[0], **{"add_generation_prompt": False}).endswith("<|im_end|>\n")


def test_a_surrogate_in_a_chat_is_refused():
    tokenizer = fakes.ours(fakes.byte_level(), chat_template=ChatTemplate({"default": CHATML}, "here"))
    with pytest.raises(RequestError, match="unpaired surrogate") as caught:
        tokenizer.apply_chat_template([{"role": "user", "content": "cut \ud83d"}])
    assert caught.value.param == "messages"
