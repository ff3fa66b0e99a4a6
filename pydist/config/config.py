"""`pydist.Config`: how training is set up, in one validated object."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import threading
from collections.abc import Mapping
from typing import Any

from pydist import _native
from pydist.config.fields import ENGINE, find, require_section, text_of, variable_of
from pydist.config.files import read_tables
from pydist.config.hints import as_in_a_file
from pydist.config.variables import environment_with, parse_backend
from pydist.errors import InvalidUsage

# The source of what the program itself says.
ARGUMENT = "argument"

# By these a configuration is known that was written for DeepSpeed: each of them has one.
_OF_DEEPSPEED_ALONE = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "zero_optimization",
}


class Config:
    """How training is set up: the engine, the wrapper, the optimizer, the loader, and the steps.

    It is in force from `pydist.init(config=)` or `pydist.initialize(config=)` to `pydist.shutdown`;
    the file that PYDIST_CONFIG names is from the import of pydist on. Then the calls of which it
    has a section take from it what the program leaves out of their arguments. What the program says
    (arguments, keywords and dicts of this class) goes before variables of the environment, these
    before files, and these before defaults.

    Args:
        engine: The variables of the engine, in lower case and without their first word: `backend`,
            `timeout`, `chunk_bytes`; of the variable's type, or its text. A job's secret is not
            among them.
        model: Arguments of `pydist.DataParallel`, such as `compress`.
        optimizer: Arguments of `pydist.ShardedOptimizer`; for `pydist.initialize` also `name`,
            a class of torch.optim, `params`, its arguments, and `stage=0`, its default, which
            shards nothing.
        loader: Arguments of `pydist.prepare`.
        training: For `pydist.initialize`: `batch_size` (of all ranks, for a step),
            `micro_batch_size` (of a rank, for a backward), `accumulation_steps`,
            `clip_grad_norm`, `dtype` ("float32" or "bfloat16"), `drop_last`.

    Raises:
        InvalidUsage: A name is unknown (the message has the nearest one that is known), or a value
            is of a wrong type, or none that the engine takes. What else a call can't do with a
            value that it takes from here, it says then, with the value's source.

    Example:
        >>> config = pydist.Config(model={"compress": "bf16"}, engine={"timeout": 120})
        >>> config["model"]
        {'compress': 'bf16'}
        >>> config.updated(model={"reduction": "sum"})["model"]
        {'compress': 'bf16', 'reduction': 'sum'}
    """

    def __init__(
        self,
        *,
        engine: Mapping[str, Any] | None = None,
        model: Mapping[str, Any] | None = None,
        optimizer: Mapping[str, Any] | None = None,
        loader: Mapping[str, Any] | None = None,
        training: Mapping[str, Any] | None = None,
        **unknown: Any,
    ) -> None:
        given = {
            ENGINE: engine,
            "model": model,
            "optimizer": optimizer,
            "loader": loader,
            "training": training,
            **unknown,  # refused, with the nearest name
        }
        # Where each value is from, by section and name: "argument", or a file's path.
        self.sources: dict[tuple[str, str], str] = {}
        self._tables: dict[str, dict[str, Any]] = {}
        self._add({name: table for name, table in given.items() if table is not None}, ARGUMENT)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = ARGUMENT) -> Config:
        """Of a dict of sections, each a dict. See the class for errors.

        Args:
            values: By section and name.
            source: Where they are from, if not from the program: variables go before them then.
        """
        config = cls()
        config._add(values, source)
        return config

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Config:
        """Of a file: JSON if its name ends in ".json", otherwise TOML, with a table a section.

        Raises:
            InvalidUsage: The file can't be read, or as for the class; the message has the path.
        """
        config = cls()
        config._add(read_tables(path), os.fspath(path))
        return config

    @classmethod
    def from_deepspeed(cls, config: str | os.PathLike[str] | Mapping[str, Any]) -> Config:
        """Of DeepSpeed's configuration, a file or a dict: ZeRO, batch sizes, bf16, clipping, Adam.

        What only makes DeepSpeed faster or more talkative is named in a warning.

        Raises:
            InvalidUsage: Something in it would change the training, and is not understood; the
                message names all of it.
        """
        from pydist.config.deepspeed import translate  # not at import: few need it

        if isinstance(config, Mapping):
            return cls.from_dict(translate(config, "DeepSpeed's configuration"))
        path = os.fspath(config)
        return cls.from_dict(translate(read_tables(config), path), path)

    def updated(self, **sections: Mapping[str, Any]) -> Config:
        """A configuration in which these values, by section, go before this one's."""
        return self.merged(Config(**sections))

    def merged(self, other: Config) -> Config:
        """A configuration in which the other's values go before this one's."""
        both = Config()
        for each in (self, other):
            for section, table in each._tables.items():
                both._tables.setdefault(section, {}).update(table)
            both.sources.update(each.sources)
        return both

    def engine_alone(self) -> Config:
        """What it says of the engine, and nothing else."""
        engine = Config()
        engine._tables[ENGINE] = self[ENGINE]
        engine.sources = {key: source for key, source in self.sources.items() if key[0] == ENGINE}
        return engine

    def __getitem__(self, section: str) -> dict[str, Any]:
        """What is given in a section, without defaults."""
        return copy.deepcopy(self._tables.get(section, {}))

    def source_of(self, section: str, name: str) -> str | None:
        """Where a value is from: "argument", or a file's path; None where there is none."""
        return self.sources.get((section, name))

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """All that is given, for `from_dict`, or for JSON."""
        return {section: self[section] for section, table in self._tables.items() if table}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Config.from_dict({self.to_dict()!r})"

    def _add(self, tables: Mapping[str, Any], source: str) -> None:
        if not isinstance(tables, Mapping):
            raise InvalidUsage(f"a configuration is a dict of sections, and this is {tables!r}")
        where = "pydist.Config" if source == ARGUMENT else source
        if not _OF_DEEPSPEED_ALONE.isdisjoint(tables):
            raise InvalidUsage(
                f"{where}: this is DeepSpeed's configuration: pydist.Config.from_deepspeed reads it"
            )
        for section, table in tables.items():
            require_section(section, where)
            if not isinstance(table, Mapping):
                raise InvalidUsage(f"{where}: {section} is {table!r}; it must be a table of names")
            for name, given in table.items():
                field = find(section, str(name), where)
                try:
                    value = as_in_a_file(given)
                    field.require(value, where)
                    json.dumps(value)
                except InvalidUsage:
                    raise
                except (TypeError, ValueError) as error:
                    raise InvalidUsage(
                        f"{where}: {section}.{name} is {given!r}, which no file could have, nor a "
                        f"checkpoint: {error}"
                    ) from error
                self._tables.setdefault(section, {})[name] = value
                self.sources[section, name] = source
        _require_valid(self._tables.get(ENGINE, {}), where)


# Held while variables are changed.
environment_lock = threading.Lock()


def _require_valid(engine: Mapping[str, Any], source: str) -> None:
    """Has the engine judge its variables, by the same words as when it reads them."""
    if not engine:
        return
    # Without the others: what is wrong with one of them is not this configuration's fault.
    variables: dict[str, str | None] = {
        name: None for name, *_ in _native.environment_variables()
    } | {variable_of(name): text_of(value) for name, value in engine.items()}
    for name, value in engine.items():
        if "\0" in text_of(value):
            raise InvalidUsage(f"{source}: engine.{name} is {value!r}, which no variable can be")
    if "backend" in engine:
        parse_backend(text_of(engine["backend"]), f"{source}: engine.backend")
    try:
        with environment_lock, environment_with(variables):
            _native.read_environment()
    except InvalidUsage as error:
        told = str(error)
        for name in engine:
            told = told.replace(f"{variable_of(name)}=", f"engine.{name}=")
        raise InvalidUsage(f"{source}: {told}") from None
    finally:
        # Reading sets what is logged, too.
        with contextlib.suppress(InvalidUsage):
            _native.read_environment()
