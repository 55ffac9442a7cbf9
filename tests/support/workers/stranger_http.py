"""Speaks another protocol."""

import socket
import sys

with socket.socket(fileno=int(sys.argv[1])) as engine:
    engine.sendall(b"\x12\x00\x00\x00GET / HTTP/1.1\r\n\r\n")
    while engine.recv(4096):
        pass
