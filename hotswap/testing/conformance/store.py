"""`WeightStoreConformance`: what every store must do, wherever it keeps its bytes."""

from __future__ import annotations

from hotswap.testing.conformance.store_prefetch import PrefetchChecks
from hotswap.testing.conformance.store_reading import ReadingChecks

__all__ = ["WeightStoreConformance"]


class WeightStoreConformance(ReadingChecks, PrefetchChecks):
    """Every sentence of `hotswap.store.WeightStore` that can be tested, as a class to inherit from.

    ```python
    class TestMyStore(WeightStoreConformance):
        models = (ModelId("a"), ModelId("b"))

        def make_store(self) -> MyStore:
            return MyStore("/weights")
    ```

    See `StoreSuite` for all hooks. Abilities that the store lacks are skipped.
    """
