"""The request body that a chat sends, and the commands that change it."""

import pytest

from cluster.tools.conversation import HELP, Conversation

USER, ASSISTANT = "user", "assistant"


def messages(conversation: Conversation, question: str = "q") -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in conversation.body(question)["messages"]]


def test_request_contains_system_prompt_history_and_question() -> None:
    conversation = Conversation("be brief")
    conversation.add_answer("a", "b")
    expected_messages = [("system", "be brief"), (USER, "a"), (ASSISTANT, "b"), (USER, "q")]
    assert messages(conversation) == expected_messages
    assert messages(conversation) == expected_messages, "building a request body changes nothing"
    conversation.command("/reset")
    assert messages(conversation) == [("system", "be brief"), (USER, "q")]
    conversation.command("/system in  verse ")
    assert messages(conversation)[0] == ("system", "in  verse")
    conversation.command("/system")
    assert messages(conversation) == [(USER, "q")]


def test_set_commands_become_request_fields() -> None:
    conversation = Conversation()
    for line in ("/set temperature 0.2", "/set stop END", '/set stop ["a", "b"]', "/set ignore_eos true"):
        conversation.command(line)
    body = conversation.body("q")
    body.pop("messages")
    assert body == {"temperature": 0.2, "stop": ["a", "b"], "ignore_eos": True}
    assert conversation.command("/set") == 'temperature=0.2 stop=["a", "b"] ignore_eos=true'
    conversation.command("/set stop")
    assert "stop" not in conversation.body("q")
    assert conversation.command("/help") == HELP


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set temperature hot", "temperature: must be a number"),
        ("/set temperature -1", "temperature: must be greater than or equal to 0"),
        ("/set temprature 0.5", "unknown field 'temprature'; did you mean 'temperature'?"),
        ("/set n 2", "n cannot be set in a chat"),
        ("/set model other", "model cannot be set in a chat"),
        ("/set messages []", "messages"),
        ("/set stream false", "stream cannot be set in a chat"),
        ("/sett x 1", "there is no command '/sett'"),
        ("/", "there is no command '/'"),
    ],
)
def test_invalid_chat_command_is_refused_and_changes_nothing(line: str, message: str) -> None:
    conversation = Conversation()
    with pytest.raises(ValueError) as captured_error:
        conversation.command(line)
    assert message in str(captured_error.value) and "\n" not in str(captured_error.value)
    assert conversation.settings == {}
