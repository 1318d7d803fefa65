"""Shapes of well-known models, so that a plan can speak of memory before a download.

From each model's `config.json` on the Hugging Face hub. A model that lies in a directory or in the
cache is read from there; this table is asked only where it does not.
"""

from collections.abc import Mapping
from typing import Any

NAME_ENDINGS_BY_KIND = {
    "-": ("",),
    "base": ("", "-Base"),
    "it": ("", "-Instruct"),
    "it-only": ("-Instruct",),
    "2507": ("", "-Instruct-2507", "-Thinking-2507"),
    "all": ("", "-Base", "-Instruct-2507", "-Thinking-2507"),
}
"""Endings under which the hub has models of one shape."""

KNOWN_SHAPES_TABLE = """\
repo                       endings family    layers hidden heads kv dim   ffn  vocab tied experts
Qwen/Qwen2.5-0.5B          it      qwen2         24    896    14  2  64  4864 151936 yes
Qwen/Qwen2.5-1.5B          it      qwen2         28   1536    12  2 128  8960 151936 yes
Qwen/Qwen2.5-3B            it      qwen2         36   2048    16  2 128 11008 151936 yes
Qwen/Qwen2.5-7B            it      qwen2         28   3584    28  4 128 18944 152064 no
Qwen/Qwen2.5-14B           it      qwen2         48   5120    40  8 128 13824 152064 no
Qwen/Qwen2.5-32B           it      qwen2         64   5120    40  8 128 27648 152064 no
Qwen/Qwen2.5-72B           it      qwen2         80   8192    64  8 128 29568 152064 no
Qwen/Qwen2.5-Coder-0.5B    it      qwen2         24    896    14  2  64  4864 151936 yes
Qwen/Qwen2.5-Coder-1.5B    it      qwen2         28   1536    12  2 128  8960 151936 yes
Qwen/Qwen2.5-Coder-3B      it      qwen2         36   2048    16  2 128 11008 151936 yes
Qwen/Qwen2.5-Coder-7B      it      qwen2         28   3584    28  4 128 18944 152064 no
Qwen/Qwen2.5-Coder-14B     it      qwen2         48   5120    40  8 128 13824 152064 no
Qwen/Qwen2.5-Coder-32B     it      qwen2         64   5120    40  8 128 27648 152064 no
Qwen/Qwen2.5-Math-1.5B     it      qwen2         28   1536    12  2 128  8960 151936 yes
Qwen/Qwen2.5-Math-7B       it      qwen2         28   3584    28  4 128 18944 152064 no
Qwen/Qwen3-0.6B            base    qwen3         28   1024    16  8 128  3072 151936 yes
Qwen/Qwen3-1.7B            base    qwen3         28   2048    16  8 128  6144 151936 yes
Qwen/Qwen3-4B              all     qwen3         36   2560    32  8 128  9728 151936 yes
Qwen/Qwen3-8B              base    qwen3         36   4096    32  8 128 12288 151936 no
Qwen/Qwen3-14B             base    qwen3         40   5120    40  8 128 17408 151936 no
Qwen/Qwen3-32B             -       qwen3         64   5120    64  8 128 25600 151936 no
Qwen/Qwen3-30B-A3B         all     qwen3_moe     48   2048    32  4 128  6144 151936 no   128x8x768
Qwen/Qwen3-235B-A22B       2507    qwen3_moe     94   4096    64  4 128 12288 151936 no   128x8x1536
meta-llama/Meta-Llama-3-8B it      llama         32   4096    32  8 128 14336 128256 no
meta-llama/Llama-3.1-8B    it      llama         32   4096    32  8 128 14336 128256 no
meta-llama/Llama-3.1-70B   it      llama         80   8192    64  8 128 28672 128256 no
meta-llama/Llama-3.1-405B  it      llama        126  16384   128  8 128 53248 128256 no
meta-llama/Llama-3.2-1B    it      llama         16   2048    32  8  64  8192 128256 yes
meta-llama/Llama-3.2-3B    it      llama         28   3072    24  8 128  8192 128256 yes
meta-llama/Llama-3.3-70B   it-only llama         80   8192    64  8 128 28672 128256 no
HuggingFaceTB/SmolLM2-135M it      llama         30    576     9  3  64  1536  49152 yes
HuggingFaceTB/SmolLM2-360M it      llama         32    960    15  5  64  2560  49152 yes
HuggingFaceTB/SmolLM2-1.7B it      llama         24   2048    32 32  64  8192  49152 yes
"""
"""A shape a line. `kv`: heads of keys and values; `dim`: of one head; `tied`: whether the output
head is the input embedding; `experts`: how many, how many a token visits, the width of one."""
_CONFIG_KEY_BY_COLUMN = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv": "num_key_value_heads",
    "dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
}
_EXPERT_KEYS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


def find_known_config(repo: str) -> Mapping[str, Any] | None:
    return read_known_configs().get(repo)


def read_known_configs() -> dict[str, dict[str, Any]]:
    """The sizes of every known model, by its `owner/name`."""
    titles, *rows = (line.split() for line in KNOWN_SHAPES_TABLE.splitlines())
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        shape = dict(zip(titles, row, strict=False))
        config: dict[str, Any] = {
            key: int(shape[name]) for name, key in _CONFIG_KEY_BY_COLUMN.items()
        }
        config["model_type"] = shape["family"]
        config["tie_word_embeddings"] = shape["tied"] == "yes"
        config["rms_norm_eps"] = 1e-6  # no size depends on it
        if "experts" in shape:
            numbers = map(int, shape["experts"].split("x"))
            config |= dict(zip(_EXPERT_KEYS, numbers, strict=True))
        found |= {
            f"{shape['repo']}{ending}": config for ending in NAME_ENDINGS_BY_KIND[shape["endings"]]
        }
    return found
