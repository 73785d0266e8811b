"""The examples for Kubernetes: by the schemas of Kubernetes and of the training operator, and their own commands."""

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from leftovers import watched
from ranks import free_port

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
VERSION = "1.31"  # of Kubernetes
SCHEMA = json.loads((Path(__file__).parent / "pytorchjob.schema.json").read_text())
SERVICE, JOB = yaml.safe_load_all((FOLDER / "job.yaml").read_text())
PYTORCHJOB = yaml.safe_load((FOLDER / "pytorchjob.yaml").read_text())
REPLICAS = PYTORCHJOB["spec"]["pytorchReplicaSpecs"]

SCRIPT = """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
import lightning_hetero

trainer = Trainer(
    strategy="hetero_node", accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
)
trainer.fit(BoringModel())
places = [(place.node, place.local_rank) for place in trainer.strategy.job.view.places]
print(f"rank {trainer.global_rank} of {trainer.world_size}: {places}\\n", flush=True)
"""


def check_pod(template: dict[str, Any]) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": template["spec"]}
    kubernetes_validate.validate(pod, VERSION, strict=True)


def check_job(job: dict[str, Any]) -> None:
    kubernetes_validate.validate(job, VERSION, strict=True)
    check_pod(job["spec"]["template"])


def check_pytorchjob(job: dict[str, Any]) -> None:
    jsonschema.validate(job, SCHEMA)
    for replicas in job["spec"]["pytorchReplicaSpecs"].values():
        check_pod(replicas["template"])


def test_the_manifests_are_valid() -> None:
    kubernetes_validate.validate(SERVICE, VERSION, strict=True)
    check_job(JOB)
    check_pytorchjob(PYTORCHJOB)
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


SPOILED: dict[str, Callable[[Any], Any]] = {
    "no master": lambda replicas: replicas.pop("Master"),
    "misspelt": lambda replicas: replicas["Worker"].update(restartpolicy="OnFailure"),
    "another name": lambda replicas: container(replicas["Master"]["template"]).update(name="train"),
    "no image": lambda replicas: container(replicas["Worker"]["template"]).update(img="x"),
    "two masters": lambda replicas: replicas["Master"].update(replicas=2),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_what_is_wrong_would_be_found(spoil: Callable[[Any], Any]) -> None:
    job = copy.deepcopy(PYTORCHJOB)
    spoil(job["spec"]["pytorchReplicaSpecs"])
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check_pytorchjob(job)


def test_pods_find_each_other() -> None:
    """The Service selects the Job's Pods, gives them names, and ranks use the first one's."""
    name, spec = JOB["metadata"]["name"], JOB["spec"]
    assert SERVICE["spec"]["selector"] == {"job-name": name}
    assert SERVICE["spec"]["clusterIP"] == "None"
    assert SERVICE["spec"]["publishNotReadyAddresses"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    assert spec["template"]["spec"]["subdomain"] == SERVICE["metadata"]["name"]
    assert f"--master-addr {name}-0.{SERVICE['metadata']['name']} " in command(JOB["spec"]["template"])
    assert f"--nnodes {spec['parallelism']} " in command(JOB["spec"]["template"])
    for replicas in REPLICAS.values():
        assert f"--master-addr {PYTORCHJOB['metadata']['name']}-master-0 " in command(replicas["template"])


@pytest.mark.parametrize("template", [JOB["spec"]["template"], *(r["template"] for r in REPLICAS.values())])
def test_torchrun_has_its_time_to_end(template: dict[str, Any]) -> None:
    assert template["spec"]["terminationGracePeriodSeconds"] > 30
    assert command(template).startswith("exec torchrun ")
    assert {"/runs", "/dev/shm"} == {mount["mountPath"] for mount in container(template)["volumeMounts"]}


def test_gpus_are_as_many_as_ranks() -> None:
    for replicas in REPLICAS.values():
        limits = container(replicas["template"])["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == int(variables(replicas["template"])["RANKS"])


def container(template: dict[str, Any]) -> dict[str, Any]:
    [found] = template["spec"]["containers"]
    return found


def command(template: dict[str, Any]) -> str:
    assert container(template)["command"] == ["bash", "-c"]
    [text] = container(template)["args"]
    return text


def variables(template: dict[str, Any]) -> dict[str, str]:
    return {pair["name"]: pair["value"] for pair in container(template)["env"]}


def pods_of_job(port: int) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """Each Pod's template, and what Kubernetes adds to its variables."""
    return [(JOB["spec"]["template"], {"JOB_COMPLETION_INDEX": str(i)}) for i in range(JOB["spec"]["completions"])]


def pods_of_pytorchjob(port: int) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """The same for a PyTorchJob, as the training operator makes its Pods."""
    templates = [replicas["template"] for replicas in REPLICAS.values() for _ in range(replicas["replicas"])]
    common = {"WORLD_SIZE": str(len(templates)), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    return [(template, {**common, "RANK": str(number)}) for number, template in enumerate(templates)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("pods", "places"),
    [
        (pods_of_job, [(0, 0), (1, 0)]),
        (pods_of_pytorchjob, [(0, 0), (0, 1), (1, 0), (2, 0)]),
    ],
)
def test_their_commands_train(tmp_path: Path, pods: Callable[[int], list[Any]], places: list[tuple[int, int]]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    port = free_port()
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    own["PATH"] = f"{Path(sys.executable).parent}:{own['PATH']}"
    with watched() as running:
        started = []
        for template, added in pods(port):
            text = re.sub(r"--master-addr \S+", "--master-addr 127.0.0.1", command(template))
            text = text.replace("--master-port 29500", f"--master-port {port}")
            env = {**os.environ, **own, **variables(template), **added}
            started.append(
                subprocess.Popen(
                    [*container(template)["command"], text],
                    cwd=tmp_path,
                    env=env,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        printed = [process.communicate(timeout=300)[0] for process in started]
        assert [process.returncode for process in started] == [0] * len(started), "\n".join(printed)
        assert running() == []
    lines = sorted(line for text in printed for line in text.splitlines() if line.startswith("rank "))
    assert lines == [f"rank {rank} of {len(places)}: {places}" for rank in range(len(places))]
