"""What the roles of a process tell of it when somebody asks: numbers with names and labels."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

_NO_LABELS: Mapping[str, str] = MappingProxyType({})


class PrometheusSample(NamedTuple):
    """One number of a process."""

    name: str
    """`areal_hpc_<role>_<what>`, with its unit; one that ends in `_total` only grows."""
    value: float
    labels: Mapping[str, str] = _NO_LABELS


SampleReader = Callable[[], Iterable[PrometheusSample]]
_readers: list[SampleReader] = []


def register_sample_reader(read_samples: SampleReader) -> None:
    """Have `read_samples` called, in a thread of its own, whenever the process is asked."""
    _readers.append(read_samples)


def list_sample_readers() -> list[SampleReader]:
    return list(_readers)


def build_samples(prefix: str, values: Mapping[str, object]) -> Iterator[PrometheusSample]:
    """A sample for each value that is a number: `reward/mean` becomes `<prefix>_reward_mean`."""
    for name, value in values.items():
        if isinstance(value, int | float):
            plain = "".join(one if one.isalnum() and one.isascii() else "_" for one in name)
            yield PrometheusSample(f"{prefix}_{plain}", value)
