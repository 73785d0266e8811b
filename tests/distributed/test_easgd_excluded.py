"""Parameters that are excluded from the elastic strategies stay apart."""

from typing import Any

import pytest
import torch
from center_tasks import APART, fit
from ranks import run
from tasks import Net, dataset
from test_easgd import PULL
from torch.utils.data import DataLoader

# -- what does not take part ---------------------------------------------------------------------------------


WITH_CENTER = ["easgd", "overlap", "async", "round_robin", "diloco"]


def _excluding() -> list[list[dict[str, Any]]]:
    results = []
    for name in WITH_CENTER:
        options = {} if name == "diloco" else PULL
        loaders = [DataLoader(dataset(96), batch_size=4, shuffle=True) for _ in range(2)]
        settings = zip(loaders, ([], ["*bias"]), strict=True)
        results.append([fit(name, Net(), data, epochs=1, tau=1, exclude=names, **options) for data, names in settings])
    return results


class Nesterov(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True)


BIAS = torch.cat([torch.full((p.numel(),), name.endswith("bias")) for name, p in Net().named_parameters()])


@pytest.mark.long
def test_what_is_excluded_stays_apart_and_its_mean_is_left() -> None:
    for name, results in zip(WITH_CENTER, zip(*run(_excluding, 3, nodes=APART), strict=True), strict=True):
        paths = [apart["path"] for _, apart in results]
        if name == "diloco":  # all meet at every step: only what is excluded differs
            assert torch.equal(paths[0][:, ~BIAS], paths[1][:, ~BIAS])
        assert not torch.equal(paths[0][:, BIAS], paths[1][:, BIAS])
        mean = (3 * paths[0][-1] + paths[1][-1] + 2 * paths[2][-1])[BIAS] / 6
        for whole, apart in results:
            assert torch.allclose(apart["final"][BIAS], mean, rtol=0, atol=1e-13)
            assert torch.equal(apart["final"], results[0][1]["final"])
            before, after = whole["traffic"]["bytes"], apart["traffic"]["bytes"]
            assert after < before or before == 0  # memory, or the center's host
            if name in ("easgd", "overlap", "diloco"):  # 17 of 161 values; they go over the wire once, at the end
                assert after == pytest.approx(before * 144 / 161 + 2 * 2 / 3 * 17 * 8, abs=30)


def _excluded_eamsgd() -> list[dict[str, Any]]:
    data = [DataLoader(dataset(96), batch_size=4, shuffle=True) for _ in range(2)]
    options = {"epochs": 1, "exclude": ["*"], "tau": 1, **PULL}
    return [fit(name, Nesterov(), d, **options) for name, d in zip(("eamsgd", "easgd"), data, strict=True)]


def test_eamsgd_leaves_what_is_excluded_alone() -> None:
    for eamsgd, easgd in run(_excluded_eamsgd, 2, nodes=[1, 1]):
        assert torch.equal(eamsgd["path"], easgd["path"])
