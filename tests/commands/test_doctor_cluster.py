"""`rhyme doctor --cluster` on a Ray cluster of three nodes on this machine, the last one with another installation."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

import rhyme_verl
from rhyme_verl.cli import app
from rhyme_verl.commands.doctor.cluster import check_cluster
from rhyme_verl.commands.doctor.finding import Verdict
from tests.commands.test_doctor import CPU
from tests.helpers.ray_cluster import ray_nodes

NODES = 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The last node finds rhyme_verl at another path, and an older torch."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "rhyme_verl").symlink_to(Path(rhyme_verl.__file__).parent)
    (folder / "torch-1.0.dist-info").mkdir()
    (folder / "torch-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    with ray_nodes(NODES, 1, env_vars={"PYTHONPATH": str(folder)}) as (address, nodes):
        yield address, nodes, folder


def test_another_version_on_one_node_is_a_fault_and_another_folder_a_note(cluster, tmp_path, monkeypatch):
    address, nodes, elsewhere = cluster
    monkeypatch.chdir(tmp_path)  # Ray's workers may import from the driver's folder
    findings = list(check_cluster(address, [tmp_path], CPU))
    (wrong,) = [one for one in findings if one.verdict is Verdict.FAULT]
    (older,) = [one for one in wrong.text.removeprefix("torch differs: ").split("; ") if one.startswith("1.0 on ")]
    assert [node[:6] in older for node in nodes] == [False, False, True]
    (other,) = [one for one in findings if one.verdict is Verdict.NOTE and one.check != "clocks"]
    assert f"{elsewhere}/rhyme_verl on " in other.text
    texts = [one.text for one in findings if one.verdict is Verdict.OK]
    assert texts[0].startswith(f"{NODES} nodes answer: ")
    assert f"{tmp_path} is shared and writable on all nodes" in texts
    assert texts[-1].startswith("each node reaches ports")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_missing_or_relative_is_a_fault(cluster, tmp_path):
    missing = tmp_path / "missing"
    findings = [one for one in check_cluster(cluster[0], [missing, Path("runs")], CPU) if one.check == "folders"]
    assert [one.verdict for one in findings] == [Verdict.FAULT] * (NODES + 1)
    assert all(f"{missing} cannot be written on " in one.text for one in findings[:NODES])
    assert "runs is relative" in findings[NODES].text


def test_an_address_without_a_cluster_is_a_fault():
    result = CliRunner().invoke(app, ["doctor", "--quick", "--cluster", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert "no Ray cluster answers at 127.0.0.1:1" in " ".join(result.stdout.split())
