"""The KubeRay and Slurm examples are well-formed, and their command lines parse."""

import re
import shlex
import subprocess
from pathlib import Path

import yaml

from lightning_embodied.cli import EmbodiedCLI

EXAMPLES = Path(__file__).parents[2] / "docs" / "ray"


class OnlyParse(EmbodiedCLI):
    """Reads the command line and builds nothing."""

    def instantiate_classes(self):
        pass

    def fit(self, **kwargs):
        pass

    def _run_subcommand(self, subcommand):
        pass


def strategy_of(command):
    words = shlex.split(command)
    assert words[:2] == ["lightning-embodied", "fit"]
    config = OnlyParse(args=words[1:]).config.fit
    assert config.ckpt_path == "last"
    assert config.trainer.accelerator == "gpu"
    return config.trainer.strategy


def test_rayjob():
    job = yaml.safe_load((EXAMPLES / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        pod = group["template"]["spec"]
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    strategy = strategy_of(job["spec"]["entrypoint"])
    workers = cluster["workerGroupSpecs"][0]
    gpus = int(workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert strategy.init_args.num_workers == workers["replicas"] * gpus


def test_slurm():
    path = EXAMPLES / "slurm.sh"
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text().replace("\\\n", " ").replace('"$((SLURM_NNODES * 8))"', "64")
    command = re.search(r"^lightning-embodied fit .*?(?= &$)", text, re.M)[0]
    assert strategy_of(command).init_args.num_workers == 64
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", text, re.M))
    assert options["signal"] == "B:TERM@120"
    assert options["gpus-per-node"] == "8"
