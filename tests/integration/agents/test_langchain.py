"""LangChain's agent, a LangGraph graph: model and tools take turns."""

from tests.integration.agents.theatre import Theatre, assert_a_tool_was_used


def test_a_graph_of_model_and_tools_is_recorded(theatre: Theatre) -> None:
    (scene,) = theatre.play("frameworks", {"workflow": "forced_langchain.ForcedAgent"})
    assert_a_tool_was_used(scene)
