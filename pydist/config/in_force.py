"""The configuration in force, and what the calls that it is for were made with.

Note [What goes before what]
The program's arguments go before variables, these before files, these before defaults. Calls see to
the first: they take from the configuration what the program has left out. Values of the section
"engine" are put into the environment, where the engine reads them: those of a file only where no
variable is set, those that the program gives also where one is. Ranks that this process starts do
not find them there: they read the file that PYDIST_CONFIG names by themselves.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ParamSpec, TypeAlias, TypeVar

from pydist.config.config import ARGUMENT, Config, environment_lock
from pydist.config.fields import ENGINE, SECTIONS, add_arguments, fields_of, text_of, variable_of
from pydist.config.hints import as_in_a_file, matches
from pydist.errors import InvalidUsage

P = ParamSpec("P")
R = TypeVar("R")

# What a program may pass as `config=`.
Configuration: TypeAlias = Config | dict[str, Any] | str | os.PathLike[str]

DEFAULT = "default"

# By `pydist.init(config=)`.
_given: Config | None = None


@dataclass(frozen=True)
class _Put:
    """A variable that a configuration has set."""

    text: str
    source: str
    before: str | None


# By their names.
_put: dict[str, _Put] = {}
# What the last call of each section was made with: value and source, by name.
_made_with: dict[str, dict[str, tuple[Any, str]]] = {}


@dataclass(frozen=True)
class Setting:
    """A value in force."""

    section: str
    name: str
    value: Any
    # A file, a variable, "argument" or "default".
    source: str


@functools.cache
def _of_file(path: str) -> Config:
    return Config.from_file(path)


def current() -> Config:
    """The configuration in force: that of `pydist.init`, over that of PYDIST_CONFIG.

    Raises:
        InvalidUsage: the file that PYDIST_CONFIG names can't be read, or is not valid.
    """
    return over_file(_given)


def over_file(given: Config | None) -> Config:
    """What a configuration that the program has given makes of that of PYDIST_CONFIG.

    Raises:
        InvalidUsage: the file that PYDIST_CONFIG names can't be read, or is not valid.
    """
    path = os.environ.get("PYDIST_CONFIG")
    of_file = _of_file(path) if path else Config()
    return of_file if given is None else of_file.merged(given)


def configuration_of(given: Configuration | None) -> Config | None:
    """What a program passes as `config=`: a Config, a dict, or a file's path."""
    if given is None or isinstance(given, Config):
        return given
    return Config.from_dict(given) if isinstance(given, dict) else Config.from_file(given)


def use(config: Config | None) -> None:
    """Puts a configuration in force; None: that of PYDIST_CONFIG alone."""
    global _given
    found = over_file(config)
    with environment_lock:
        _take_back()
        _given = config
        for name, value in found[ENGINE].items():
            variable, source = variable_of(name), found.sources[ENGINE, name]
            before = os.environ.get(variable)
            if source == ARGUMENT or not before:
                _put[variable] = _Put(text_of(value), source, before)
                os.environ[variable] = text_of(value)


def _is_put(variable: str) -> bool:
    """Whether a variable has the value that a configuration has given it: nobody changed it."""
    return variable in _put and os.environ.get(variable) == _put[variable].text


def _take_back() -> None:
    for name, put in _put.items():
        if not _is_put(name):
            continue
        if put.before is None:
            del os.environ[name]
        else:
            os.environ[name] = put.before
    _put.clear()


def leave_environment() -> None:
    """Takes variables that a configuration has set out of the environment again.

    For a process that starts others: they read the configuration by themselves, and what it says
    must not go for variables that the user has set.
    """
    with environment_lock:
        _take_back()


@contextlib.contextmanager
def outside_environment() -> Iterator[None]:
    """Like `leave_environment`, for as long as others are started."""
    leave_environment()
    try:
        yield
    finally:
        with contextlib.suppress(InvalidUsage):
            use(_given)


@contextlib.contextmanager
def entering(
    config: Config | None, backend: str | None, timeout: timedelta | None
) -> Iterator[None]:
    """Puts a configuration in force, and takes it back where the job can't be entered.

    Without one, what is in force stays so.

    Args:
        config: what the program gives `pydist.init`.
        backend: as well: it goes before the configuration.
        timeout: likewise.
    """
    before = _given
    use(before if config is None else config)  # changes nothing where it raises
    try:
        yield
    except BaseException:
        use(before)
        raise
    given = {"backend": backend, "timeout": timeout and timeout.total_seconds()}
    note(ENGINE, {name: value for name, value in given.items() if value is not None}, {})


@contextlib.contextmanager
def taken_back_by_errors() -> Iterator[None]:
    """Takes back what is put in force inside, where an error comes out.

    But for the engine's part: a job that has been entered runs with that.
    """
    before = _given
    try:
        yield
    except BaseException:
        if _given is not None and _given is not before:
            engine = _given.engine_alone()
            use(engine if before is None else before.merged(engine))
        raise


def change(config: Config | None, timeout_s: float, backend: str) -> None:
    """Puts more of a configuration in force while a job runs, for the calls that follow.

    Args:
        config: what is added.
        timeout_s: that of the job, which may be from an argument.
        backend: likewise.

    Raises:
        InvalidUsage: it has another value for the engine, which runs with what it has read.
    """
    if config is None:
        return
    running_with = {"timeout": timeout_s, "backend": backend}
    for name, value in config[ENGINE].items():
        variable = variable_of(name)
        by_variable = bool(os.environ.get(variable)) and not _is_put(variable)
        if by_variable and config.sources[ENGINE, name] != ARGUMENT:
            continue  # the variable goes before a file
        running = running_with.get(
            name, os.environ.get(variable) or fields_of(ENGINE)[name].default
        )
        if not _same(running, value):
            raise InvalidUsage(
                f"engine.{name}={text_of(value)} comes too late: the job runs already, with "
                f"{running or 'nothing'} for it. Pass the configuration to the first call of "
                "pydist.init, which comes before the first pydist.DataParallel, or set "
                "PYDIST_CONFIG to a file."
            )
    use(config if _given is None else _given.merged(config))


def _same(running: object, value: object) -> bool:
    """Whether a variable's text means the same: 600 is 600.0."""
    texts = [text_of(running), text_of(value)]
    try:
        return float(texts[0]) == float(texts[1])
    except ValueError:
        return texts[0] == texts[1]


def forget() -> None:
    """The job is over: what was given for it counts no more, nor what was made in it."""
    _made_with.clear()
    use(None)


def use_file_at_import() -> None:
    """Puts the file of PYDIST_CONFIG in force, if it can be: `pydist.init` says why it can't."""
    try:
        use(None)
    except InvalidUsage:
        return


def takes_from_config(
    section: str,
    *,
    names: Collection[str],
    alike: Collection[Collection[str]] = (),
    unless: Callable[[Mapping[str, Any]], bool] = lambda given: False,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Has a call take arguments that the program leaves out from a section in force.

    Args:
        section: one of `SECTIONS`.
        names: of these arguments, which are values that a file can have.
        alike: names of arguments that say the same: where the program gives one, it has said all.
        unless: whether a call takes none, by what the program gives it.
    """

    def decorate(call: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(call)
        add_arguments(section, signature, names, call.__globals__)

        @functools.wraps(call)
        def taking(*args: P.args, **kwargs: P.kwargs) -> R:
            config = current()
            try:
                given = signature.bind_partial(*args, **kwargs).arguments
            except TypeError:
                return call(*args, **kwargs)  # which says what is wrong, with its name
            said = set(given)
            for group in alike:
                if said & set(group):
                    said |= set(group)
            more = {
                name: value
                for name, value in config[section].items()
                if name in names and name not in said and not unless(given)
            }
            kwargs.update(more)
            try:
                result = call(*args, **kwargs)
            except InvalidUsage as error:
                _tell_sources(error, [(name, config.source_of(section, name)) for name in more])
                raise
            defaults = {name: signature.parameters[name].default for name in names}
            note(section, {name: given[name] for name in names if name in given}, more, defaults)
            return result

        return taking

    return decorate


def _tell_sources(error: InvalidUsage, taken: Iterable[tuple[str, str | None]]) -> None:
    """Adds where values are from that an error names, and that the program has not given."""
    told = str(error)
    named = [
        f"{name} is from {'the configuration' if source == ARGUMENT else source}"
        for name, source in taken
        if re.search(rf"\b{name}\b", told)
    ]
    if named:
        error.args = (f"{told.rstrip('.')} ({', '.join(named)})",)


def note(
    section: str,
    given: dict[str, Any],
    taken: dict[str, Any],
    defaults: dict[str, Any] | None = None,
) -> None:
    """Notes what a call was made with.

    Args:
        section: the call's.
        given: what the program has said.
        taken: what the configuration has.
        defaults: the call's, where they are not those of the section.
    """
    config = current()
    made = {name: (value, DEFAULT) for name, value in (defaults or {}).items()}
    made |= {name: (value, ARGUMENT) for name, value in given.items()}
    made |= {
        name: (value, config.source_of(section, name) or DEFAULT) for name, value in taken.items()
    }
    _made_with[section] = made


def settings() -> list[Setting]:
    """All values in force and where they are from.

    Those of arguments are what the last call of a section was made with; before the first, what it
    will find.
    """
    config = current()
    found = []
    for section in SECTIONS:
        for name, field in fields_of(section).items():
            if section == ENGINE and name not in _made_with.get(ENGINE, {}):
                variable = variable_of(name)
                text = os.environ.get(variable)
                source = _put[variable].source if _is_put(variable) else variable
                value, source = (text, source) if text else (field.default, DEFAULT)
            elif section in _made_with:
                value, source = _made_with[section].get(name, (field.default, DEFAULT))
            else:
                value = config[section].get(name, field.default)
                source = config.source_of(section, name) or DEFAULT
            found.append(Setting(section, name, value, source))
    return found


# Of the section "engine", what belongs to a machine or to one run.
_NOT_SAVED = {"host_id", "interface", "ports", "timeline", "dump", "faults", "log"}


def to_save() -> dict[str, dict[str, Any]]:
    """What a checkpoint keeps: what is in force and makes the training what it is, but defaults."""
    kept: dict[str, dict[str, Any]] = {}
    for each in settings():
        field = fields_of(each.section)[each.name]
        belongs_here = each.section == ENGINE and each.name in _NOT_SAVED
        value = as_in_a_file(each.value)
        if each.source != DEFAULT and not belongs_here and matches(value, field.hint):
            kept.setdefault(each.section, {})[each.name] = value
    return kept
