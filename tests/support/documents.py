"""Code blocks of AReaL's guides in tests/documents, and the scene in which each of Python runs.

A scene's `before` replaces the guide's prose and earlier blocks, `after` uses the block's results.
A patch is the least change without which the block cannot run anywhere.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "documents"
_FENCE = re.compile(r"^([ \t]*)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_PROSE = re.compile(r"[A-Z]|\s*\d+\.\s|\s*•")
"""Beginning of a paragraph of an unfenced page that is no code."""
_COMMAND = re.compile(r"^(pip|python3?|export|workflow=)", re.MULTILINE)
_SETTING = re.compile(r"^(# .*\n)*\w+:( |$)", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    document: str
    number: int
    """Counted from 1 within its document."""
    language: str
    """`python`, `yaml`, `command` or `drawing`."""
    text: str

    @property
    def key(self) -> str:
        return f"{self.document}:{self.number}"

    @property
    def beginning(self) -> str:
        """First line that is no comment."""
        lines = [line.strip() for line in self.text.splitlines()]
        return next(line for line in lines if line and not line.startswith("#"))


def blocks() -> list[Block]:
    all_blocks = []
    for path in sorted(FOLDER.glob("*.txt")):
        text = path.read_text()
        pieces = fenced(text) if "```" in text else unfenced(text)
        all_blocks += [
            Block(path.stem, number, language_of(piece), piece)
            for number, piece in enumerate(pieces, 1)
        ]
    return all_blocks


def fenced(text: str) -> list[str]:
    """List the text between fences, without its indentation."""
    return [
        "".join(line.removeprefix(match[1]) for line in match[3].splitlines(keepends=True))
        for match in _FENCE.finditer(text)
    ]


def unfenced(text: str) -> list[str]:
    """Runs of paragraphs that do not begin as prose does."""
    runs: list[list[str]] = [[]]
    for paragraph in re.split(r"\n[ \t]*\n", text):
        is_heading = paragraph.rstrip().endswith("#") and "\n" not in paragraph.strip()
        if _PROSE.match(paragraph) or is_heading:
            runs.append([])
        elif paragraph.strip():
            runs[-1].append(paragraph)
    return ["\n\n".join(run) + "\n" for run in runs if run]


def language_of(text: str) -> str:
    if "┌" in text:
        return "drawing"
    if _COMMAND.search(text):
        return "command"
    return "yaml" if _SETTING.match(text) else "python"


@dataclass(frozen=True)
class Patch:
    old: str
    new: str
    why: str


def patched(block: Block, text: str, patches: tuple[Patch, ...]) -> str:
    for patch in patches:
        assert patch.old in text, f"{block.key} holds no {patch.old!r}"
        text = text.replace(patch.old, patch.new)
    return text


@dataclass(frozen=True)
class Scene:
    """Surroundings in which one block runs."""

    after: str = ""
    before: str = ""
    patches: tuple[Patch, ...] = ()
    environment: str = "main"

    def text_of(self, block: Block) -> str:
        return patched(block, block.text, self.patches)


ELLIPSIS = "`...` stands for code of the reader's"
CALL = 'chat.completions.create(model="default", messages=data["messages"])'
OWN_CALL = f"await AsyncOpenAI().{CALL}"
INJECTED = (
    'client = AsyncOpenAI(base_url=extra_kwargs["base_url"], api_key=extra_kwargs["api_key"], '
    'http_client=extra_kwargs["http_client"])\n'
)
CAMEL_MODEL = (
    'AReaLOpenAICompatibleModel(openai_client=client, tokenizer=tokenizer, model_type="areal")'
)
NEW_CLIENT = "from areal.experimental.openai import ArealOpenAI\n" + (
    "client = ArealOpenAI(engine=engine, tokenizer=tokenizer)\n"
)
TOOL_CLIENT = NEW_CLIENT.replace("tokenizer)", 'tokenizer, tool_call_parser="qwen25")')
"""Hand-offs are tools, and a client is told how its model writes calls, as the guide says."""
RECORDED = "assert client.export_interactions()\n"
FUNCTION_AGENT = Scene(
    before="from openai import AsyncOpenAI",
    patches=(Patch("    ...\n", f"    {OWN_CALL}\n    return 0.5\n", ELLIPSIS),),
    after="assert await subproc_episode(MyAgentWorkflow) == 0.5",
)
MY_AGENT = """
class Asking:
    async def run_agent(self, data, client):
        await client.chat.completions.create(model="default", messages=data["messages"])
        client.set_final_reward(0.5)
        return 0.5
"""

AGENTS = {
    "agent_workflow_training:2": FUNCTION_AGENT,
    "proxy_mode:2": FUNCTION_AGENT,
    "custom_agents_zh:1": Scene(
        before="from openai import AsyncOpenAI\ncompute_reward = lambda response, answer: 0.25",
        after="assert await episode(MyAgent()) == 0.25",
    ),
    "custom_agents_zh:3": Scene(
        patches=(Patch("str, float]\n", "str, float]: ...\n", "a signature without a body"),)
    ),
    "custom_agents_zh:6": Scene(
        patches=(
            Patch('            api_key="DUMMY",  # Not used by AReaL\n', "", "a repeated keyword"),
        ),
        before="compute_reward = lambda response, answer: 0.25",
        after="assert await subproc_episode(MySyncAgent) == 0.25",
    ),
    "custom_agents_zh:7": Scene(
        before="is_correct = True",
        patches=(
            Patch(
                "    # ... agent logic ...\n", f"    {INJECTED}    await client.{CALL}\n", ELLIPSIS
            ),
        ),
        after='assert await episode(type("Agent", (), {"run": run})()) == 1.0',
    ),
    "custom_agents_zh:8": Scene(
        patches=(
            Patch(
                "    # ... multi-turn agent logic ...\n",
                f"    {INJECTED}    one = (await client.{CALL}).id\n"
                f"    two = (await client.{CALL}).id\n",
                ELLIPSIS,
            ),
            Patch('"completion-id-1"', "one", "an id that no reply has"),
            Patch('"completion-id-2"', "two", "an id that no reply has"),
        ),
        after='assert await episode(type("Agent", (), {"run": run})()) == 1.0',
    ),
    "custom_agents_zh:9": Scene(
        before=NEW_CLIENT,
        patches=(Patch("create(...)", CALL.removeprefix("chat.completions."), ELLIPSIS),),
        after="client.set_reward(completion_id, 1.0)\n" + RECORDED,
    ),
    "openai_agents:8": Scene(
        before="from areal.experimental.openai import ArealOpenAI",
        after=f"interaction_id = (await client.{CALL}).id\nreward_value = 0.5",
    ),
    "openai_agents:9": Scene(after="assert client.get_interaction(interaction_id).reward == 0.5"),
    "openai_agents:10": Scene(before=f"reward_value = 1.0\nawait client.{CALL}"),
    "openai_agents:11": Scene(),
    "openai_agents:12": Scene(
        after="rewards = [one.reward for one in interactions.values()]\n"
        "assert rewards == [0.5 + 0.9 * 1.0, 1.0], rewards\n"
        "assert all(one.completion.id == name for name, one in interactions.items())\n"
        "assert all(one.model_response.output_tokens for one in interactions.values())"
    ),
    "openai_agents:14": Scene(
        before="my_reward_function = lambda text: float(len(text))",
        after='assert await async_reward_fn("four") == 4.0',
    ),
    "openai_agents:15": Scene(
        before=MY_AGENT
        + "from types import SimpleNamespace\n"
        + "from areal.experimental.openai import ArealOpenAI\n"
        + "self = SimpleNamespace(agent=Asking(), n_trajs=2)\n"
        + "clients = [ArealOpenAI(engine=engine, tokenizer=tokenizer) for _ in range(2)]",
        after="assert rewards == [0.5, 0.5]",
    ),
    "openai_agents:16": Scene(before="client = clients[0]", after=RECORDED),
    "openai_agents:13": Scene(
        before="""
import sys, tempfile, types
from dataclasses import dataclass, field
from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.utils.stats_logger import StatsLogger
made = []
class Kept:
    def __init__(self, **kwargs):
        made.append(kwargs)
my_workflow = types.ModuleType("my_workflow")
my_workflow.MyAgentWorkflow = Kept
sys.modules["my_workflow"] = my_workflow
folder = tempfile.mkdtemp()
with open(f"{folder}/config.yaml", "w") as file:
    file.write(f"stats_logger: {{fileroot: {folder}, experiment_name: e, trial_name: t}}")
""",
        after="""
main(["--config", f"{folder}/config.yaml", "n_trajs=3", "gconfig.max_new_tokens=7"])
(kwargs,) = made
assert (kwargs["n_trajs"], kwargs["gconfig"].max_new_tokens) == (3, 7)
assert kwargs["dump_dir"] == f"{folder}/e/t/logs/generated"
""",
    ),
}

SDK = "from agents import Agent as OpenAIAgent, ModelSettings, OpenAIProvider, RunConfig\n" + (
    "from agents import Runner as OpenAIRunner\n"
)
ASKED = (
    'await OpenAIRunner.run({}, input="What is 1 + 2?", run_config=RunConfig('
    "model_provider=OpenAIProvider(openai_client=client), tracing_disabled=True))\n"
)
FRAMEWORKS = {
    "openai_agents:5": Scene(
        before="my_reward_function = lambda result, answer: 0.5",
        after="client = ArealOpenAI(engine=engine, tokenizer=tokenizer)\n"
        "assert await MyAgent().run_agent(data, client) == 0.5\n" + RECORDED,
    ),
    "openai_agents:6": Scene(
        patches=(
            Patch("        self,\n        ...\n", "        self, tokenizer, n_trajs\n", ELLIPSIS),
            Patch(
                "        self.agent = MyAgent()\n        ...\n",
                "        self.agent = MyAgent()\n"
                "        self.tokenizer, self.n_trajs = tokenizer, n_trajs\n",
                ELLIPSIS,
            ),
        ),
        after="assert await episode(MyAgentWorkflow(tokenizer, 2)) == 0.5",
    ),
    "openai_agents:7": Scene(
        patches=(
            Patch(
                "        # set reward\n        ...\n",
                "        reward = 0.75\n        client.set_final_reward(reward)\n",
                ELLIPSIS,
            ),
        ),
        after=TOOL_CLIENT
        + "assert await MultiAgentMathAgent().run_agent(data, client) == 0.75\n"
        + RECORDED,
    ),
    "agentic_rl:11": Scene(
        patches=(
            Patch("problem_analyzer, ...)", "problem_analyzer)", ELLIPSIS),
            Patch("solution_specialist, ...)", "solution_specialist)", ELLIPSIS),
        ),
        after=SDK + TOOL_CLIENT + ASKED.format("build_math_agent()") + RECORDED,
    ),
    "agentic_rl:13": Scene(
        before="from areal.api.cli_args import GenerationHyperparameters\n"
        "PreTrainedTokenizerFast = object"
    ),
    "agentic_rl:14": Scene(
        before="from areal.api.reward_api import AsyncRewardWrapper",
        patches=(
            Patch(
                "        self.temperature = temperature\n",
                "        self.agent_builder_kwargs = agent_builder_kwargs\n"
                "        self.temperature = temperature\n",
                "an attribute that is used and never set",
            ),
        ),
        after="""
import sys, types
guide = types.ModuleType("guide")
guide.build = lambda name: OpenAIAgent(name=name, instructions="You add.")
guide.reward = lambda completions, answer, prompt, prompt_ids, completion_ids: 0.5
sys.modules["guide"] = guide
workflow = OpenAIAgentWorkflow(
    agent_builder_path="guide.build",
    agent_builder_kwargs={"name": "Adder"},
    reward_fn_path="guide.reward",
    gconfig=GenerationHyperparameters(n_samples=2, max_tokens=3000),
    tokenizer=tokenizer,
)
assert await episode(workflow) == 0.5
""",
    ),
    "agentic_rl:17": Scene(after=NEW_CLIENT + ASKED.format("build_custom_agent()") + RECORDED),
    "agentic_rl:19": Scene(
        before="get_tools = list",
        after=NEW_CLIENT + ASKED.format('build_parameterized_agent("You add.")') + RECORDED,
    ),
    "agentic_rl:21": Scene(
        before="reward_value = 0.5",
        after="assert await AsyncRewardWrapper(custom_reward_fn)"
        '(completions="", answer="", prompt=None, prompt_ids=None, completion_ids=None) == 0.5',
    ),
}
CAMEL = {
    "agentic_rl:2": Scene(
        before="from areal.experimental.camel.openai_model import AReaLOpenAICompatibleModel\n"
        + NEW_CLIENT,
        patches=(Patch('"gpt-4o-mini"', CAMEL_MODEL, "a model of a paid service"),),
    ),
    "agentic_rl:3": Scene(after=RECORDED),
    "agentic_rl:4": Scene(after="assert client.tree.last_completed.reward in (0.0, 1.0)"),
    "agentic_rl:5": Scene(
        patches=(
            Patch("AReaLOpenAICompatibleModel(...)", CAMEL_MODEL, ELLIPSIS),
            Patch(
                "from transformers import PreTrainedTokenizerFast",
                "PreTrainedTokenizerFast = object",
                "an annotation; transformers is not needed beside CAMEL",
            ),
        ),
        after=NEW_CLIENT + "assert await CamelMathAgent(tokenizer).run_agent(data, client) <= 1.0",
    ),
    "agentic_rl:6": Scene(),
    "agentic_rl:7": Scene(
        before="from areal.api.cli_args import GRPOConfig\nconfig = GRPOConfig()",
        after="assert await episode(workflow) <= 1.0",
    ),
    "agentic_rl:9": Scene(
        before="your_tools = None",
        patches=(
            Patch(
                "            tools=[your_tools],  # Add tool calling\n",
                "",
                "CAMEL 0.2.90 gives this agent no tools",
            ),
        ),
        after="task_agent = CamelTaskAgent()\ntask_agent.tokenizer = tokenizer\n"
        "await task_agent.run_agent(data, client)",
    ),
    "agentic_rl:10": Scene(
        patches=(
            Patch("AReaLOpenAICompatibleModel(...)", CAMEL_MODEL, ELLIPSIS),
            Patch("token_limit=...", "token_limit=2000", ELLIPSIS),
        ),
        after='await agent.astep("What is 1 + 2?")',
    ),
}
SCENES = AGENTS | {
    key: replace(scene, environment=environment)
    for environment, scenes in (("main", FRAMEWORKS), ("camel", CAMEL))
    for key, scene in scenes.items()
}
