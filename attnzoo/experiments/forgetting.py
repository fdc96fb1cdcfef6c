"""What the experiments on forgetting share: the rules of their probes, and arms that train forget networks alone."""

from attnzoo.experiments.experiment import Arm

RULES = {"sinks + window": "sinks", "H2O": "h2o", "SnapKV": "snapkv", "later use": "utility"}
ALONE = ("forgetting={alone: true, distill_steps: 1000000, budget: 0.0}",)


def network(name: str, after: str, settings: tuple[str, ...] = ALONE, **options: object) -> Arm:
    """Forget networks beside the weights of another arm, which is named by its variant; by default in one phase."""
    return Arm(name, after, {"forgetting": {"window": 2, "width": 16, **options}}, settings, (0.01,), after)
