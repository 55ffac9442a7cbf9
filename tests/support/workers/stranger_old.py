"""Speaks the worker's protocol in a version of long ago."""

import socket
import sys

from troupellm.protocol.wire.frames import Codec, Hello

with socket.socket(fileno=int(sys.argv[1])) as engine:
    engine.sendall(Codec[Hello]().encode(Hello(link="worker", version="0.0.0/0")))
    while engine.recv(4096):
        pass
