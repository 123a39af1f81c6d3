"""What a chat sends, and the words that change it."""

import pytest

from cluster.tools.conversation import HELP, Conversation

USER, ASSISTANT = "user", "assistant"


def messages(talk: Conversation, question: str = "q") -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in talk.body(question)["messages"]]


def test_request_contains_system_prompt_history_and_question() -> None:
    talk = Conversation("be brief")
    talk.add_answer("a", "b")
    said = [("system", "be brief"), (USER, "a"), (ASSISTANT, "b"), (USER, "q")]
    assert messages(talk) == said
    assert messages(talk) == said, "asking alone changes nothing"
    talk.command("/reset")
    assert messages(talk) == [("system", "be brief"), (USER, "q")]
    talk.command("/system in  verse ")
    assert messages(talk)[0] == ("system", "in  verse")
    talk.command("/system")
    assert messages(talk) == [(USER, "q")]


def test_set_commands_become_request_fields() -> None:
    talk = Conversation()
    for line in ("/set temperature 0.2", "/set stop END", '/set stop ["a", "b"]', "/set ignore_eos true"):
        talk.command(line)
    body = talk.body("q")
    body.pop("messages")
    assert body == {"temperature": 0.2, "stop": ["a", "b"], "ignore_eos": True}
    assert talk.command("/set") == 'temperature=0.2 stop=["a", "b"] ignore_eos=true'
    talk.command("/set stop")
    assert "stop" not in talk.body("q")
    assert talk.command("/help") == HELP


@pytest.mark.parametrize(
    ("line", "said"),
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
def test_invalid_chat_command_is_refused_and_changes_nothing(line: str, said: str) -> None:
    talk = Conversation()
    with pytest.raises(ValueError) as refused:
        talk.command(line)
    assert said in str(refused.value) and "\n" not in str(refused.value)
    assert talk.settings == {}
