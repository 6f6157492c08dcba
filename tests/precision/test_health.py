"""Layers under observation against sums by hand, exclusions against measuring, and both from the command line."""

import json
import warnings

import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_embodied.callbacks import FP8Health
from lightning_embodied.cli import main
from lightning_embodied.errors import ConfigError
from lightning_embodied.precision import (
    FP8Precision,
    GradientError,
    fp8_layers,
    gradients,
    high_precision,
    observe,
    propose_exclusions,
)
from lightning_embodied.precision.recipes import RECIPES
from tests.precision.networks import FlowModule, batch, loader, relative_error, trainer


def norm_ratio(error, exact):
    return float(((error - exact).norm() / exact.norm()).detach())


@pytest.mark.parametrize("recipe", RECIPES)
def test_errors_are_those_of_the_layer_on_its_own_operands(recipe):
    layer, exact = (nn.Linear(64, 32, bias=False) for _ in range(2))
    exact.load_state_dict(layer.state_dict())
    FP8Precision(recipe, "emulated").convert_module(layer)
    x, grad = torch.randn(20, 64), torch.randn(20, 32)
    with observe(layer) as observation:
        output = layer(x)
        output.backward(grad)
    exact(x).backward(grad)
    (health,) = observation.results().values()
    assert health.output_error == pytest.approx(norm_ratio(output, exact(x)), rel=1e-4)
    assert health.weight_grad_error == pytest.approx(
        norm_ratio(layer.weight.grad, exact.weight.grad), rel=1e-3, abs=1e-6
    )
    expected = {"input": x, "weight": layer.weight, "grad": grad}
    assert health.amax == pytest.approx({name: float(value.detach().abs().max()) for name, value in expected.items()})
    assert max(health.saturated.values()) == 0


def test_what_is_lost_is_counted():
    layer = nn.Linear(32, 32)
    FP8Precision("tensorwise", "emulated").convert_module(layer)
    x = torch.ones(16, 32)
    x[:, :8] = 1e-9
    with observe(layer) as observation, torch.no_grad():
        layer(x)
    (health,) = observation.results().values()
    assert health.flushed["input"] == pytest.approx(0.25)
    assert health.weight_grad_error is None


def test_observing_changes_neither_results_nor_gradients():
    model, watched = FlowModule(), FlowModule(recompute=True)
    for each in (model, watched):
        FP8Precision("delayed", "emulated").convert_module(each)
    one = batch()
    model(one).backward()
    with observe(watched) as observation:
        watched(one).backward()
    assert set(observation.results()) == set(fp8_layers(watched))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), watched.parameters(), strict=True))
    assert all(layer.fp8.probe is None for layer in fp8_layers(watched).values())


def test_observed_inside_a_compiled_model():
    layer = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))
    FP8Precision("rowwise", "emulated").convert_module(layer)
    x = torch.randn(16, 64)
    expected = layer(x)
    compiled = torch.compile(layer, backend="aot_eager")
    with observe(layer) as observation:
        compiled(x).sum().backward()
    assert len(observation.results()) == 2
    torch.testing.assert_close(compiled(x), expected)


@pytest.fixture
def measured():
    model, one = FlowModule(), batch(16)
    model.register_buffer("seen", torch.zeros(()))
    FP8Precision("rowwise", "emulated").convert_module(model)

    def loss():
        model.seen += 1
        return model(one) + 0 * torch.rand(())

    return model, loss


def test_gradients_leave_everything_as_it_was(measured):
    model, loss = measured
    state = torch.get_rng_state()
    found = gradients(model, loss, fp8_layers(model))
    assert torch.equal(state, torch.get_rng_state())
    assert model.seen == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    with high_precision(model):
        exact = gradients(model, loss, ())
    assert GradientError.between(found, exact).relative == pytest.approx(relative_error(found, exact))
    assert GradientError.between(exact, exact) == GradientError(0.0, pytest.approx(1.0))


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_exclusions_keep_the_bound_and_one_fewer_does_not(measured, share):
    model, loss = measured
    names = set(fp8_layers(model))
    exact = gradients(model, loss, ())
    bound = share * GradientError.between(gradients(model, loss, names), exact).relative
    proposal = propose_exclusions(model, loss, bound)
    assert proposal.remaining.relative <= bound < proposal.total.relative
    again = GradientError.between(gradients(model, loss, names - set(proposal.excluded)), exact)
    assert again.relative == pytest.approx(proposal.remaining.relative)
    fewer = GradientError.between(gradients(model, loss, names - set(proposal.excluded[:-1])), exact)
    assert fewer.relative > bound
    assert [proposal.alone[name] for name in proposal.excluded] == sorted(
        (proposal.alone[name] for name in proposal.excluded), reverse=True
    )


def test_nothing_to_exclude_and_no_bound_to_keep(measured):
    model, loss = measured
    proposal = propose_exclusions(model, loss, 1.0)
    assert proposal.excluded == ()
    assert proposal.remaining == proposal.total
    with pytest.raises(ConfigError, match="bound"):
        propose_exclusions(model, loss, 0.0)
    with pytest.raises(ConfigError, match="not finite"):
        propose_exclusions(model, lambda: loss() * torch.inf, 1.0)


def train(callback, tmp_path, plugin=None, steps=5, **arguments):
    plugin = plugin or FP8Precision("rowwise", "emulated")
    logger = CSVLogger(tmp_path, name="", version="")
    fit = trainer(
        max_steps=steps, plugins=plugin, callbacks=[callback], logger=logger, log_every_n_steps=1, **arguments
    )
    model = FlowModule()
    fit.fit(model, loader())
    return model, (tmp_path / "metrics.csv").read_text().splitlines()


def test_health_is_logged_while_training_and_changes_nothing(tmp_path):
    callback = FP8Health(every_n_steps=2)
    model, lines = train(callback, tmp_path)
    columns = lines[0].split(",")
    rows = [dict(zip(columns, line.split(","), strict=True)) for line in lines[1:]]
    assert [row["step"] for row in rows] == ["0", "2", "4"]
    assert {"fp8/output_error", "fp8/weight_grad_error", "fp8/flushed", "fp8/net.blocks.1.fc1/amax_grad"} <= set(
        columns
    )
    worst = max(float(row["fp8/weight_grad_error"]) for row in rows)
    assert 0.01 < worst < 0.1
    plain = FlowModule()
    trainer(max_steps=5, plugins=FP8Precision("rowwise", "emulated")).fit(plain, loader())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_only_totals_on_request(tmp_path):
    _, lines = train(FP8Health(per_layer=False), tmp_path)
    totals = {"fp8/output_error", "fp8/weight_grad_error", "fp8/flushed", "fp8/saturated"}
    assert set(lines[0].split(",")) == {"step", *totals}


def test_drift_is_warned_about_once(tmp_path):
    first = FP8Health(every_n_steps=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="FP8 is getting worse")
        train(first, tmp_path / "healthy")
    resumed = FP8Health(every_n_steps=1)
    state = first.state_dict()
    state["first"]["net.blocks.0.fc1"]["output_error"] = 1e-4
    resumed.load_state_dict(state)
    with pytest.warns(UserWarning, match=r"FP8 is getting worse in 1 layers at step 0") as caught:
        train(resumed, tmp_path / "drifted")
    texts = [str(warning.message) for warning in caught if "FP8 is getting worse" in str(warning.message)]
    assert len(texts) == 1
    assert "net.blocks.0.fc1: output error" in texts[0]


def test_a_run_without_fp8_has_no_fp8_health():
    with pytest.raises(ConfigError, match=r"(?s)nothing to look at.*FP8Precision in trainer.plugins"):
        trainer(max_steps=1, callbacks=[FP8Health()]).fit(FlowModule(), loader())
    with pytest.raises(ConfigError, match="every_n_steps"):
        FP8Health(every_n_steps=0)


BORING = "lightning.pytorch.demos.boring_classes."


@pytest.fixture
def config(tmp_path):
    model = {"class_path": "tests.precision.test_health.Wide"}
    path = tmp_path / "fit.yaml"
    path.write_text(yaml.safe_dump({"model": model, "data": {"class_path": BORING + "BoringDataModule"}}))
    return path


class Wide(FlowModule):
    """A few layers on rows of 32 features."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16))

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch).square().mean())

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.log("loss", loss, prog_bar=True)
        return {"loss": loss}


def test_the_command_measures_any_module_and_proposes_yaml(config, tmp_path, capsys):
    output = tmp_path / "report.json"
    options = ["--run", str(config), "--bound", "0.03", "--output", str(output), "--set", '["trainer.accelerator=cpu"]']
    assert main(["fp8-report", *options]) == 0
    out = capsys.readouterr().out
    content = json.loads(output.read_text())
    assert set(content["layers"]) == {"net.0", "net.2", "net.4"}
    assert content["remaining"]["relative"] <= 0.03 < content["total"]["relative"]
    assert content["excluded"]
    snippet = yaml.safe_load(out[out.index("trainer:") : out.index("written to")])
    arguments = snippet["trainer"]["plugins"][0]["init_args"]
    assert arguments == {"recipe": "rowwise", "exclude": content["excluded"]}
    assert not (tmp_path / "runs").exists()


def test_the_command_says_what_is_wrong(config, capsys):
    assert main(["fp8-report", "--run", str(config), "--set", '["trainer.max_steps"]']) == 2
    assert "key=value" in capsys.readouterr().err
    assert main(["fp8-report", "--run", "configs/nothing.yaml"]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["fp8-report", "--run", str(config), "--recipe", "mxfp8", "--backend", "torchao"]) == 2
    assert "has no recipe 'mxfp8'" in capsys.readouterr().err


def test_a_run_in_fp8_is_a_few_lines_of_yaml(config, tmp_path, capsys):
    run, fp8 = tmp_path / "run", tmp_path / "fp8.yaml"
    arguments = {"recipe": "delayed", "backend": "emulated", "exclude": ["net.4"]}
    settings = {
        "plugins": [{"class_path": "FP8Precision", "init_args": arguments}],
        "callbacks": [{"class_path": "FP8Health", "init_args": {"every_n_steps": 1}}],
        "default_root_dir": str(run),
        "max_steps": 2,
        "accelerator": "cpu",
        "log_every_n_steps": 1,
    }
    fp8.write_text(yaml.safe_dump({"trainer": settings, "wandb": "disabled"}))
    assert main(["fit", "--config", str(config), "--config", str(fp8)]) == 0
    metrics = (run / "metrics.csv").read_text()
    assert "fp8/net.2/weight_grad_error" in metrics
    assert "fp8/net.4/weight_grad_error" not in metrics
    assert set(torch.load(run / "checkpoints" / "last.ckpt")["FP8Precision"]["amax_history"]) == {"net.0", "net.2"}
    capsys.readouterr()
    assert main(["fp8-report", "--run", str(run), "--bound", "1.0"]) == 0
    assert "no layer needs to be excluded" in capsys.readouterr().out
    arguments["recipe"] = "rowwize"
    fp8.write_text(yaml.safe_dump({"trainer": settings, "wandb": "disabled"}))
    assert main(["fit", "--config", str(config), "--config", str(fp8)]) == 2
    assert "did you mean 'rowwise'" in capsys.readouterr().err
