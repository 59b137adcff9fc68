"""A store that counts what is asked of it, and ranks of a `Join` block that one process drives."""

from collections import Counter
from types import SimpleNamespace

from zero_nb.comm import agreement, group_store
from zero_nb.comm import store as store_module
from zero_nb.join import event_feed, event_log
from zero_nb.join.event_feed import EventStore
from zero_nb.join.event_log import EventLog


class Counted:
    """A store that counts requests and bytes, also those of its connections."""

    def __init__(self, store, log=None):
        self.store, self.log = store, Counter() if log is None else log

    def clone(self):
        return Counted(self.store.clone(), self.log)

    def __getattr__(self, name):
        method = getattr(self.store, name)
        if name not in (
            "set",
            "get",
            "check",
            "add",
            "compare_set",
            "delete_key",
            "wait",
            "multi_get",
            "multi_set",
        ):
            return method

        def counted(*args):
            out = method(*args)
            self.log[name] += 1
            self.log["events"] += "/event/" in str(args[0])
            self.log["bytes"] += sum(
                len(value) for value in (*args[1:], out) if isinstance(value, (str, bytes))
            )
            return out

        return counted

    @property
    def requests(self):
        return sum(count for name, count in self.log.items() if name not in ("events", "bytes"))


def take_stores_of_groups(monkeypatch):
    """Let what a block asks go to the store of its group, also in a group that has no process group."""
    for module in (store_module, event_feed, event_log):
        monkeypatch.setattr(module, "_store", lambda group: group.store)
    for module in (agreement, group_store):
        monkeypatch.setattr(module, "_has_no_peers", lambda group: False)


class Participant:
    """A rank that is driven in this process, with its own log on a store of all."""

    def __init__(self, store, size, rank):
        self.counted = Counted(store)
        self.group = SimpleNamespace(
            size=size,
            group_rank=rank,
            global_rank=rank,
            ranks=range(size),
            store=self.counted,
            process_group=None,
            _agreements=SimpleNamespace(turn=0, life=SimpleNamespace(met=True, name="")),
            _ending=SimpleNamespace(ended=""),
        )
        self.log = EventLog(EventStore(self.group, "many"))
        self.asked = 0

    def requests(self):
        """Count requests since the last call."""
        now, before = self.counted.requests, self.asked
        self.asked = now
        return now - before
