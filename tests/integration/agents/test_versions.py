"""The packages that play are those that docs/agents.md names."""

import importlib.metadata

import pytest

from tests.support.agents_table import FRAMEWORKS, Framework, locked
from tests.support.environments import python_of


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda one: one.name)
def test_the_environment_holds_the_versions_of_its_lock(framework: Framework) -> None:
    folders = (python_of(framework.environment).parents[1] / "lib").glob("python3*/site-packages")
    installed = {
        found.metadata["Name"].lower(): found.version
        for found in importlib.metadata.distributions(path=[str(one) for one in folders])
    }
    for package in framework.packages:
        assert installed[package] == locked(framework.environment)[package]
