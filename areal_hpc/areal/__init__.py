"""AReaL's names: `areal_hpc.areal.X` stands for AReaL's `areal.X`."""

from typing import TYPE_CHECKING

from areal_hpc.areal.names import install_name_finder

if TYPE_CHECKING:
    from areal_hpc.areal.ppo_trainer import PPOTrainer
else:

    def __getattr__(name: str) -> object:
        if name != "PPOTrainer":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # Imported here, because agents import some of AReaL's names without the trainer.
        from areal_hpc.areal.ppo_trainer import PPOTrainer

        return PPOTrainer


__all__ = ["PPOTrainer"]

install_name_finder()
