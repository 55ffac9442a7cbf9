import logging

from troupellm.protocol.config import ServerConfig
from troupellm.protocol.worker import LoadProgress
from troupellm.server.host import EngineHost


def test_details_of_loading_are_logged_line_by_line(caplog):
    caplog.set_level(logging.INFO, logger="troupellm.server")
    host = EngineHost(ServerConfig())
    host.report(LoadProgress(phase="weights", done=1, total=4))
    assert caplog.records == []
    host.report(LoadProgress(phase="ready", done=4, total=4, detail="weights  1 GiB\nKV cache 2 GiB"))
    assert [record.getMessage() for record in caplog.records] == ["weights  1 GiB", "KV cache 2 GiB"]
    assert host.progress.phase == "ready"
