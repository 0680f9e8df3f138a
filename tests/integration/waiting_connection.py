"""A CUDA program whose connection waits to be accepted by its child.

    waiting_connection.py STATUS

The child accepts once STATUS.go is there, and answers; then the program writes "answered" to STATUS.answer. Writes
"round N" to STATUS all the while. The program stands in front of its child in an image, as the one that connects.
"""

import os
import socket
import sys
import time

from host_writer import open_gpu


def child(listener, go):
    while not os.path.exists(go):
        time.sleep(0.02)
    connection = listener.accept()[0]
    connection.sendall(connection.recv(16).upper())
    time.sleep(1000)


def main():
    status = sys.argv[1]
    driver = open_gpu()
    # The whole network namespace's, in which process numbers repeat.
    name = b"\0stasis-waiting-" + os.urandom(8).hex().encode()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(name)
    listener.listen(4)
    if os.fork() == 0:
        child(listener, status + ".go")
    listener.close()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(name)
    number = 0
    while driver:
        number += 1
        with open(status, "w", encoding="ascii") as file:
            file.write(f"round {number}\n")
        if os.path.exists(status + ".go") and not os.path.exists(status + ".answer"):
            connection.sendall(b"answered?")
            answer = connection.recv(16).decode()
            with open(status + ".answer", "w", encoding="ascii") as file:
                file.write(answer)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
