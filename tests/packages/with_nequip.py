"""nequip: an equivariant network of the energies and forces of argon clusters, with a loss over all ranks already."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.calculators.lj import LennardJones
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write
from compare import main
from lightning.pytorch import Trainer
from nequip.data.datamodule import ASEDataModule
from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
from nequip.train import EnergyForceLoss, EnergyForceMetrics, NequIPLightningModule
from nequip.utils.global_state import set_global_state

REACH = 5.0  # of a force between atoms, in angstroms


def clusters(count: int, seed: int) -> Path:
    """A file of shaken squares of four atoms, of this rank."""
    draw, path = np.random.default_rng(seed), Path(f"{seed}-{os.environ['RANK']}.xyz")
    square = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0]])
    for _ in range(count):
        atoms = Atoms("Ar4", 3.8 * square + draw.normal(0, 0.1, (4, 3)))
        atoms.calc = LennardJones(sigma=3.4, epsilon=1.0, rc=REACH)
        known = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces()}
        atoms.calc = SinglePointCalculator(atoms, **known)
        write(path, atoms, append=True)
    return path


def target(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def train(trainer: dict[str, Any]) -> None:
    set_global_state()
    loader = {"_target_": "torch.utils.data.DataLoader", "batch_size": 4}
    data = ASEDataModule(
        seed=1,
        train_file_path=str(clusters(80, 1)),
        val_file_path=str(clusters(16, 2)),
        transforms=[ChemicalSpeciesToAtomTypeMapper(["Ar"]), NeighborListTransform(REACH)],
        train_dataloader={**loader, "shuffle": True},
        val_dataloader=loader,
    )
    sizes = {
        "num_layers": 1,
        "l_max": 1,
        "num_features": 4,
        "radial_mlp_width": 8,
        "type_names": ["Ar"],
        "r_max": REACH,
    }
    fixed = {"seed": 1, "model_dtype": "float64", "avg_num_neighbors": 3.0, "per_type_energy_scales": 1.0}
    weights = {"total_energy": 1.0, "forces": 1.0}
    module = NequIPLightningModule(
        model={"_target_": "nequip.model.NequIPGNNModel", **sizes, **fixed, "per_type_energy_shifts": -1.0},
        num_datasets={"train": 1, "val": 1, "test": 0, "predict": 0},
        optimizer={"_target_": "torch.optim.Adam", "lr": 0.01},
        loss={"_target_": target(EnergyForceLoss), "coeffs": weights},
        val_metrics={"_target_": target(EnergyForceMetrics), "coeffs": {f"{name}_mae": 1.0 for name in weights}},
    )
    fit = Trainer(**trainer)
    module.world_size = fit.world_size  # as its own script does: each rank's loss is its part of the sum
    fit.fit(module, datamodule=data)


if __name__ == "__main__":
    main("nequip", train, lambda batch: [batch["total_energy"]])
