"""Mistakes of users and the errors that they get; docs/errors.md shows them.

`tests/integration/launch/test_bad_input.py` makes those that show before anything starts, and
`tests/acceptance/test_agent_errors.py` those of agents, in runs.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tests.support import broken_agents
from tests.support.results import markdown

NO_DATA = "train_dataset.generator=null train_dataset.path=data/none.jsonl"
OWN_DATA = "train_dataset.generator=null train_dataset.kwargs={} train_dataset.path=DIR"
OWN_MODEL = "model.tiny=null model.path=DIR"
ON_GPUS = "trainer.device=cuda"
FOUR_RANKS = "trainer.parallel.dp=2 inference.replicas_per_cell=2 inference.tp=2"
SUMS = "tests.support.sums"
MADE_UP = "train_dataset.generator=tests.support.made_up_tasks"
AGENTS_MODULE = "tests.support.broken_agents"
QUICKSTART = "recipes/quickstart.yaml"


@dataclass(frozen=True)
class Mistake:
    what: str
    overrides: str
    """Overrides of the recipe; DIR, SERVE_PYTHON and TEST_PYTHON stand for paths of the test."""
    said: tuple[str, ...]
    """Parts of the output, in order."""
    recipe: str = QUICKSTART


@dataclass(frozen=True)
class AgentMistake:
    what: str
    agent: type
    said: str
    """Beginning of the line about it."""
    text: str | None
    """Text in the line of the agent that is named; None: somewhere in its file."""
    hint: str


MISTAKES = (
    # Keys and values. Misspelled on purpose: spelled right, the run starts and trains.
    Mistake(
        "a key misspelled",
        "trainer.optimzer.lr=1",
        ("unknown key 'optimzer'", "did you mean optimizer?"),
    ),
    Mistake(
        "a key in another section",
        "trainer.lr=1",
        ("unknown key 'lr'", "at: trainer.lr", "did you mean trainer.optimizer.lr?"),
    ),
    Mistake(
        "a key and its value written apart",
        "trainer.total_steps 5",
        ("expected key=value, got 'trainer.total_steps'", "write trainer.total_steps=5"),
    ),
    Mistake(
        "values that cannot be",
        "trainer.optimizer.lr=-1 trainer.total_steps=abc trial_name=a/b",
        (
            *("3 errors:", "it must match the regular expression", "at: trial_name"),
            *("it must be a valid integer", "at: trainer.total_steps"),
            *("it must be greater than 0, got -1", "at: trainer.optimizer.lr"),
        ),
    ),
    Mistake(
        "a brace that nothing closes",
        "train_dataset={",
        ("the value '{' is not YAML", "at: train_dataset", "put it in quotes"),
    ),
    Mistake(
        "an environment variable that is not set",
        "trial_name=${oc.env:NO_SUCH_VARIABLE}",
        (
            "the environment variable NO_SUCH_VARIABLE is not set",
            *("quickstart.yaml: trial_name", "or give a default: ${oc.env:NO_SUCH_VARIABLE,value}"),
        ),
    ),
    Mistake(
        "a folder in place of a recipe",
        "",
        ("recipes is a folder, expected a recipe", "ls recipes/*.yaml"),
        recipe="recipes",
    ),
    Mistake(
        "a key twice in a file",
        "",
        ("repeated.yaml is not YAML", "found duplicate key experiment_name", "line 2"),
        recipe="DIR/repeated.yaml",
    ),
    Mistake(
        "several at once",
        f"{NO_DATA} cluster.serve.python=/no/such/python rollout.should_accept={SUMS}:no_such "
        f"rollout.curriculum={SUMS}:nothing "
        "trainer.objective.custom=examples.objectives.sapo:compute",
        (
            *("5 errors:", "there is no data set at", "at: train_dataset.path"),
            *("no Python interpreter for role serve at /no/such/python", "make setup"),
            *("at: rollout.should_accept", "no_such", "at: rollout.curriculum", "nothing"),
            *("at: trainer.objective.custom", "did you mean 'compute_terms'?"),
        ),
    ),
    # Data.
    Mistake(
        "a line of a data set that is not JSON",
        f"{OWN_DATA}/broken.jsonl",
        (
            *("broken.jsonl:2:15 is not JSON: Expecting value", "at: train_dataset.path"),
            "write one JSON object on each line",
        ),
    ),
    Mistake(
        "a data set without a row",
        f"{OWN_DATA}/empty.jsonl",
        ("empty.jsonl gave no row", "at: train_dataset.path"),
    ),
    Mistake(
        "a task that may take longer than its session",
        f"{OWN_DATA}/tasks.jsonl",
        (
            "row 1, limits: proxy.session_timeout_s=3600 is less than the 5400 s",
            "at: train_dataset.path",
        ),
    ),
    Mistake(
        "a generator misspelled",
        f"train_dataset.generator={SUMS}:taks",
        (
            "the module 'tests.support.sums' has no 'taks'; did you mean 'tasks'?",
            "at: train_dataset.generator",
        ),
    ),
    Mistake(
        "a generator's module misspelled",
        "train_dataset.generator=tests.support.sumz:tasks",
        ("there is no module 'tests.support.sumz'; did you mean 'sums'?",),
    ),
    Mistake(
        "an argument that a generator does not take",
        f"{MADE_UP}:questions train_dataset.kwargs.word=7",
        (
            "got an unexpected keyword argument 'word'",
            "at: train_dataset.kwargs",
            "try: match its signature: questions(size: int, seed: int, terms: int, words: int = 5)",
        ),
    ),
    Mistake(
        "a generator that raises",
        f"{MADE_UP}:breaking",
        (
            "raised KeyError: 'qestion'",
            "made_up_tasks.py:17 in breaking: yield make_task(number)",
            "made_up_tasks.py:23 in make_task:",
            "at: train_dataset.generator",
        ),
    ),
    Mistake(
        "prompts longer than the context",
        f"{MADE_UP}:questions train_dataset.kwargs.size=4 "
        "train_dataset.kwargs.words=600 sft.dataset.kwargs.size=64",
        (
            "4 of 4 prompts of train_dataset leave no room for a reply: that of task 0 has",
            "the context has 512",
        ),
    ),
    # The agent's class.
    Mistake(
        "an agent's class misspelled",
        f"rollout.workflow={SUMS}.SumAgnt",
        ("has no 'SumAgnt'; did you mean 'SumAgent'?", "at: rollout.workflow"),
    ),
    Mistake(
        "an agent of a package that is not there",
        "rollout.workflow=no_such_package.agent.Agent",
        ("there is no module 'no_such_package'", "at: rollout.workflow", "try:"),
    ),
    Mistake(
        "an agent without a module",
        "rollout.workflow=nodots",
        ("at: rollout.workflow", "try:"),
    ),
    Mistake(
        "an agent's file with a syntax error",
        "rollout.workflow=unfinished.Agent",
        (
            "importing 'unfinished' raised SyntaxError",
            *("unfinished.py:1: class Agent(:", "at: rollout.workflow"),
        ),
    ),
    Mistake(
        "an agent whose `run` is not `async def`",
        f"rollout.workflow={AGENTS_MODULE}.Blocking",
        ("has a `run` that is not `async def`", "a class with `async def run("),
    ),
    Mistake(
        "an agent that needs arguments",
        f"rollout.workflow={AGENTS_MODULE}.NeedsArguments",
        (
            "cannot be built without arguments (missing a required argument: 'tokenizer')",
            *("at: rollout.workflow_kwargs", "match its constructor: NeedsArguments(tokenizer"),
        ),
    ),
    Mistake(
        "an agent whose constructor raises",
        f"rollout.workflow={AGENTS_MODULE}.RaisesWhenBuilt",
        (
            "cannot be built without arguments: KeyError: 'TOOLS_TOKEN'",
            *("broken_agents.py:", "at: rollout.workflow_kwargs"),
        ),
    ),
    # Environments, model, sizes.
    Mistake(
        "the Python of another role",
        "cluster.serve.python=TEST_PYTHON cluster.train.python=SERVE_PYTHON",
        (
            *("lacks sglang", "at: cluster.serve.python"),
            *("lacks megatron.core", "at: cluster.train.python", "try: make setup"),
        ),
    ),
    Mistake(
        "GPUs with a PyTorch for CPUs",
        f"{ON_GPUS} cluster.train.python=TEST_PYTHON",
        ("+cpu, which computes on CPUs alone", "at: cluster.train.python"),
    ),
    Mistake(
        "too few GPUs",
        f"{FOUR_RANKS} {ON_GPUS} {NO_DATA}",
        (
            "too few GPUs for the stage train: it needs 6 at once "
            "(trainer 2 ranks x 1 = 2, cell-0 2 replicas x tp 2 = 4), "
            "this machine shows 4 (CUDA_VISIBLE_DEVICES='3,5,7,9')",
            "there is no data set at",
        ),
    ),
    Mistake(
        "a file in place of a model's folder",
        f"{OWN_MODEL}/model.gguf",
        ("model.gguf is a file, expected a model directory", "at: model.path"),
    ),
    Mistake(
        "no model, no agent, no data",
        "model.tiny=null model.path=/no/model rollout.workflow=nowhere.Agent "
        "valid_dataset.generator=null valid_dataset.path=/no/data.jsonl",
        ("3 errors:",),
    ),
    Mistake(
        "the tokenizer of another model",
        f"{OWN_MODEL}/foreign_tokenizer",
        (
            "has token ids up to 339, but config.json says vocab_size 320: "
            "it belongs to another model",
            "at: model.path",
        ),
    ),
    Mistake(
        "a model that is not supported",
        f"{OWN_MODEL}/mamba",
        ("expected a causal language model with attention, got model_type 'mamba'",),
    ),
    Mistake(
        "quantized weights",
        f"{OWN_MODEL}/quantized",
        (
            "says that the weights are quantized (fp8); they can be neither trained nor updated",
            "at: model.path",
        ),
    ),
    Mistake(
        "a server that quantizes",
        "inference.extra_args=[--quantization,fp8]",
        (
            "--quantization cannot be given: a server that quantizes holds other weights",
            "at: inference.extra_args",
        ),
    ),
    Mistake(
        "an option that SGLang does not have",
        "inference.extra_args=[--enable-metriks]",
        (
            "SGLang has no option --enable-metriks",
            *("at: inference.extra_args", "did you mean --enable-metrics?"),
        ),
    ),
    Mistake(
        "a layout that the model's sizes do not divide by, and no tokenizer",
        f"{OWN_MODEL} trainer.parallel.tp=4 trainer.parallel.pp=3 trainer.parallel.dp=2",
        (
            "num_key_value_heads 2 must be a multiple of tp 4",
            "each pipeline stage needs a layer: num_hidden_layers is 2, pp 3",
            *("has no tokenizer.json", "copy the tokenizer files"),
        ),
    ),
    Mistake(
        "expert parallelism without experts",
        "trainer.parallel.ep=2 trainer.parallel.dp=2",
        (
            "at: trainer.parallel.ep",
            "the number of experts of a dense network, 1 must be a multiple of ep 2",
        ),
    ),
    Mistake(
        "a reply longer than the context",
        "inference.context_length=256 rollout.sampling.max_new_tokens=512",
        ("rollout.sampling.max_new_tokens=512 leaves no room for a prompt in a context of 256",),
    ),
    Mistake(
        "a context that holds nothing",
        "inference.context_length=16",
        ("it must be greater than or equal to 64", "at: inference.context_length"),
    ),
)

AGENT_MISTAKES = (
    AgentMistake(
        "a key misspelled",
        broken_agents.RaisesKeyError,
        "raised KeyError: 'anwser'",
        "anwser",
        "did you mean 'answer'? the task has messages, answer",
    ),
    AgentMistake(
        "a column that the task does not have",
        broken_agents.ReadsMissingColumn,
        "raised KeyError: 'question'",
        "question",
        "the task has messages, answer",
    ),
    AgentMistake(
        "a reward that is no number",
        broken_agents.ReturnsString,
        "returned '1.0' (str), expected a finite float",
        "async def run",
        "fix ",
    ),
    AgentMistake(
        "no call of the model",
        broken_agents.MakesNoCall,
        "made no model call, so there is nothing to reward",
        "async def run",
        "call the model at the `base_url`",
    ),
    AgentMistake(
        "tools, and no parser for calls of them",
        broken_agents.AsksForTools,
        "raised BadRequestError: no tool-call parser is configured (set "
        "inference.tool_call_parser to the model's format)",
        None,
        "fix ",
    ),
    AgentMistake(
        "an address of its own",
        broken_agents.CallsFixedAddress,
        "raised openai.APITimeoutError: Request timed out.",
        None,
        "call the model at the `base_url`",
    ),
)


def mistakes_table() -> str:
    rows = ((mistake.what, _as_code(mistake.said)) for mistake in MISTAKES)
    return markdown(("mistake", "among what is printed"), rows)


def agent_mistakes_table() -> str:
    rows = []
    for mistake in sorted(AGENT_MISTAKES, key=lambda mistake: mistake.hint == "fix "):
        hint = _as_code([f"try: {mistake.hint.strip()}"])
        then = "the line of the agent to mend" if mistake.hint == "fix " else hint
        rows.append((mistake.what, _as_code([f"agent    {mistake.said}"]), then))
    return markdown(("mistake", "printed", "and then"), rows)


def _as_code(parts: Iterable[str]) -> str:
    """Put each part in backticks that it does not contain itself, one below the other."""
    lines = []
    for part in parts:
        fence = "``" if "`" in part else "`"
        pad = " " if "`" in part else ""
        lines.append(f"{fence}{pad}{part}{pad}{fence}".replace("|", "\\|"))
    return "<br>".join(lines)
