"""A model that was imported before: whether its checkpoint is still the one it was converted from."""

from __future__ import annotations

import json
import logging
import secrets
from dataclasses import dataclass
from pathlib import Path

from hotswap.backends.stores.checkpoint import has_checkpoint, read_checkpoint
from hotswap.backends.stores.durable import write_file
from hotswap.backends.stores.files import read_small
from hotswap.backends.stores.fingerprint import ConversionOptions, Fingerprint
from hotswap.backends.stores.layout import SOURCE_NAME
from hotswap.errors import ShardCorrupt, ShardMissing, SourceChanged
from hotswap.model import Layout, Manifest, Model

__all__ = ["ImportedModel"]

_log = logging.getLogger("hotswap.stores")


@dataclass(frozen=True, slots=True)
class ImportedModel:
    """A model in a store on disk: its directory and its manifest."""

    directory: Path
    manifest: Manifest

    def options_to_convert_again(self, model: Model) -> ConversionOptions | None:
        """Return how to convert the model anew; `None` if the weights are to be served as they are. Blocking.

        A source that is gone, or has no `config.json` any more, has not changed: a checkpoint may be deleted
        once it is imported.

        Raises:
            SourceChanged: the checkpoint has changed, and `model.on_change` is `"refuse"`.
            StoreError: it cannot be read.
        """
        assert model.source is not None, "a model without a source has nothing to compare"
        source = Path(model.source)
        if not has_checkpoint(source):
            return None
        fingerprint = self._fingerprint()
        if model.layout not in (None, self.manifest.layout):
            change = f"it is there in the layout {self.manifest.layout!r}, and {model.layout!r} is asked for"
        elif fingerprint is None:
            change = self._change_of_config(model.id, source)
        else:
            change = fingerprint.difference(source)
        if change is None:
            if fingerprint is not None:
                self._note_times(fingerprint, fingerprint.with_times_of(source))
            return None
        what = f"The checkpoint of model {model.id!r} in {str(source)!r} is not the one it was imported from"
        if model.on_change == "refuse":
            raise SourceChanged(
                f"{what}: {change}. Convert it anew by `Model(..., on_change='convert')` or `hotswap store "
                "add --replace`, or serve the weights that were imported by `on_change='serve'`."
            )
        if model.on_change == "serve":
            _log.warning("%s: %s. The weights that were imported are served.", what, change)
            return None
        _log.warning("%s: %s. It is converted anew.", what, change)
        options = fingerprint.options if fingerprint is not None else self._options()
        return self._in_layout(options, model.layout)

    def _in_layout(self, options: ConversionOptions, layout: Layout | None) -> ConversionOptions:
        """The options of before, or those of another layout that is asked for."""
        return options if layout in (None, options.layout) else ConversionOptions(layout=layout)

    def _fingerprint(self) -> Fingerprint | None:
        path = self.directory / SOURCE_NAME
        try:
            return Fingerprint.parse(read_small(path), path)
        except ShardMissing:
            return None
        except ShardCorrupt as exc:
            _log.warning("%s", exc)
            return None

    def _note_times(self, before: Fingerprint, now: Fingerprint) -> None:
        """Keep the times of a copy, so that its files are not read again."""
        if now == before:
            return
        path = self.directory / f".{SOURCE_NAME}.{secrets.token_hex(4)}"
        try:
            write_file(path, now.dump())
            path.replace(self.directory / SOURCE_NAME)
        except OSError as exc:  # a root that may only be read, for instance
            _log.info("The times of the checkpoint were not kept in %r: %s", str(self.directory), exc)

    def _change_of_config(self, model: str, source: Path) -> str | None:
        """Compare the config, all that is known of a model imported before its files were recorded."""
        if json.loads(read_checkpoint(source).config) != json.loads(self.manifest.config):
            return "'config.json' has other content"
        _log.warning(
            "Model %r was imported before the files of checkpoints were recorded: its config alone was "
            "compared with %r. Import it again by `hotswap store add --replace` to have all compared.",
            model,
            str(source),
        )
        return None

    def _options(self) -> ConversionOptions:
        """What the manifest tells of the options."""
        return ConversionOptions(
            world_size=self.manifest.world_size,
            quantize=self.manifest.quantization or None,
            layout=self.manifest.layout,
        )
