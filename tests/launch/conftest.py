"""Hosts with ssh servers for all tests of a file, with a check for leftover processes."""

from collections.abc import Iterator

import pytest

from tests.support.ssh_hosts import Lab, eventually, lab


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab(tmp_path_factory.mktemp("lab"), ["desk", "attic", "cellar"]) as made:
        yield made


@pytest.fixture
def nobody_left(hosts: Lab) -> Iterator[None]:
    """Check that the test ends with only ssh servers on all hosts."""
    yield
    assert eventually(lambda: not hosts.at_work()), f"still at work: {hosts.at_work()}"
