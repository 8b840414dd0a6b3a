"""Running means: what is true lately, of things that change."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT = 0.125  # of the latest value


@dataclass(slots=True)
class Mean:
    """The plain mean of the first values, then an exponential one."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) * max(WEIGHT, 1 / self.count)


@dataclass(slots=True)
class Line:
    """The straight line y(x) through the latest points, by weighted least squares (West 1979). It never
    falls with x, and far to the left never below a quarter of the mean."""

    mass: float = 0.0
    mean_x: float = 0.0
    mean_y: float = 0.0
    variance: float = 0.0
    covariance: float = 0.0

    def add(self, x: float, y: float, weight: float) -> None:
        self.mass = (1 - WEIGHT) * self.mass + weight
        share = weight / self.mass
        off_x, off_y = x - self.mean_x, y - self.mean_y
        self.mean_x += share * off_x
        self.mean_y += share * off_y
        self.variance = (1 - share) * (self.variance + share * off_x * off_x)
        self.covariance = (1 - share) * (self.covariance + share * off_x * off_y)

    def at(self, x: float) -> float:
        slope = self.covariance / self.variance if self.variance > 0 else 0.0
        return max(self.mean_y + max(slope, 0.0) * (x - self.mean_x), self.mean_y / 4)
