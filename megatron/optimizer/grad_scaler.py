"""The factor that the loss carries through the backward pass, so that small gradients survive in float16.

Micikevicius et al., "Mixed Precision Training", 2018. Growth, back-off and hysteresis are Megatron-LM's.
"""

from __future__ import annotations

from typing import Protocol


class GradScaler(Protocol):
    """A loss scale that may answer to overflows."""

    @property
    def scale(self) -> float: ...

    @property
    def absorbs_overflow(self) -> bool:
        """Whether a gradient that is not finite may be an overflow that a smaller scale would cure."""

    def update(self, found_inf: bool) -> None:
        """Called once a step, after the gradients were looked at."""

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float]) -> None: ...


class ConstantGradScaler:
    """A fixed loss scale: 1, or what `--loss-scale` says. It has no state; the flag of this run holds."""

    def __init__(self, scale: float = 1.0) -> None:
        assert scale > 0, scale
        self._scale = scale

    @property
    def scale(self) -> float:
        return self._scale

    @property
    def absorbs_overflow(self) -> bool:
        return False

    def update(self, found_inf: bool) -> None:
        pass

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        pass


class DynamicGradScaler:
    """A loss scale that grows while all goes well and backs off on overflow.

    After `growth_interval` steps in a row without overflow the scale is doubled. On an overflow it is halved, but not
    below `min_scale`, and not for the first `hysteresis - 1` overflows since it last grew. Only growth restores the
    hysteresis; until then each further overflow backs off.
    """

    def __init__(
        self,
        *,
        initial_scale: float,
        min_scale: float,
        growth_interval: int,
        hysteresis: int,
    ) -> None:
        assert 0 < min_scale <= initial_scale, (min_scale, initial_scale)
        assert growth_interval >= 1 and hysteresis >= 1, (growth_interval, hysteresis)
        self._scale = initial_scale
        self.min_scale = min_scale
        self.growth_interval = growth_interval
        self.hysteresis = hysteresis
        self.growth_tracker = 0
        self.hysteresis_tracker = hysteresis

    @property
    def scale(self) -> float:
        return self._scale

    @property
    def absorbs_overflow(self) -> bool:
        return self._scale > self.min_scale

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self._scale = max(self._scale / 2, self.min_scale)
        else:
            self.growth_tracker += 1
            # More than the interval, where the state is of a run with a longer one.
            if self.growth_tracker >= self.growth_interval:
                self.growth_tracker = 0
                self.hysteresis_tracker = self.hysteresis
                self._scale *= 2

    def state_dict(self) -> dict[str, float]:
        return {
            "scale": self._scale,
            "growth_tracker": self.growth_tracker,
            "hysteresis_tracker": self.hysteresis_tracker,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take over a saved state; an empty one, of a run without a dynamic scale, leaves the first scale.

        A scale below the minimum of this run is raised to it: below it the first overflow would be an error, as if
        there were nothing left to back off to.
        """
        if state:
            self._scale = max(float(state["scale"]), self.min_scale)
            self.growth_tracker = int(state["growth_tracker"])
            self.hysteresis_tracker = int(state["hysteresis_tracker"])
