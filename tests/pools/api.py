"""A strict stand-in for the API of Kubernetes, for the tests of the provider `kubernetes`.

    api.py DIR PORT

It serves pods and secrets of the namespace `lab` over TLS, as the published reference of the API says: it refuses what the
real one refuses (a wrong token, content type, name, label or field), answers in pages, and removes what belongs to a pod
with the pod. Its pods run for real, as processes of this machine; what they have mounted is in a directory. DIR has
`cert.pem`, `key.pem` and `token`; where there is a file `quota` in it, the quota of the namespace is used up.
"""

import base64
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

DIR, PORT = Path(sys.argv[1]), int(sys.argv[2])
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
KEY = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")
# The fields that a document may have here, by where they are; a leaf says its type.
META = {"name": str, "namespace": str, "labels": dict, "annotations": dict, "ownerReferences": list}
CONTAINER = {
    "name": str, "image": str, "command": list, "args": list, "env": list, "resources": {"limits": dict, "requests": dict},
    "volumeMounts": [{"name": str, "mountPath": str, "readOnly": bool}], "imagePullPolicy": str, "securityContext": dict,
}
POD_SPEC = {
    "restartPolicy": str, "automountServiceAccountToken": bool, "terminationGracePeriodSeconds": int,
    "containers": [CONTAINER], "volumes": [{"name": str, "secret": {"secretName": str}, "emptyDir": dict}],
    "priorityClassName": str, "nodeSelector": dict, "tolerations": list, "runtimeClassName": str, "hostNetwork": bool,
}
KINDS = {
    "pods": {"apiVersion": str, "kind": str, "metadata": META, "spec": POD_SPEC},
    "secrets": {"apiVersion": str, "kind": str, "metadata": META, "type": str, "data": dict, "stringData": dict},
}
PAGE = 2  # items at most, whatever is asked for
lock = threading.RLock()
kept = {"pods": {}, "secrets": {}}


class Refused(Exception):
    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


def must(good, code, message):
    if not good:
        raise Refused(code, message)


def check(value, form, at):
    """A value of the form, or 400 as the API answers with strict validation of fields."""
    if isinstance(form, dict):
        must(isinstance(value, dict), 400, f"{at} must be an object")
        for key, part in value.items():
            must(key in form, 400, f'strict decoding error: unknown field "{at}.{key}"')
            check(part, form[key], f"{at}.{key}")
    elif isinstance(form, list):
        must(isinstance(value, list), 400, f"{at} must be a list")
        for part in value:
            check(part, form[0], at)
    else:
        must(isinstance(value, form) and not (form is int and isinstance(value, bool)), 400, f"{at} must be {form.__name__}")


def check_meta(meta):
    must(NAME.fullmatch(meta.get("name", "")), 422, f"metadata.name: Invalid value: {meta.get('name')!r}")
    for key, value in {**meta.get("labels", {}), **meta.get("annotations", {})}.items():
        must(KEY.fullmatch(key) and isinstance(value, str), 422, f"metadata: Invalid value: {key!r}: {value!r}")
    for value in meta.get("labels", {}).values():
        must(LABEL.fullmatch(value), 422, f"metadata.labels: Invalid value: {value!r}")
    for owner in meta.get("ownerReferences", []):
        must({"apiVersion", "kind", "name", "uid"} <= owner.keys(), 422, "metadata.ownerReferences: Required value")


def check_pod(spec):
    must(spec.get("containers"), 422, "spec.containers: Required value")
    must(spec.get("restartPolicy", "Always") in ("Always", "OnFailure", "Never"), 422, "spec.restartPolicy: Unsupported value")
    volumes = {volume["name"] for volume in spec.get("volumes", [])}
    for container in spec["containers"]:
        must(container.get("name") and container.get("image"), 422, "spec.containers: Required value: name and image")
        resources = container.get("resources", {})
        for value in [*resources.get("limits", {}).values(), *resources.get("requests", {}).values()]:
            must(isinstance(value, str) and QUANTITY.fullmatch(value), 422, f"resources: Invalid value: {value!r}")
        for mount in container.get("volumeMounts", []):
            must(mount["name"] in volumes, 422, f"volumeMounts: Not found: {mount['name']!r}")


def store(kind, document):
    meta = document["metadata"]
    if kind == "secrets":
        for key, value in document.pop("stringData", {}).items():
            document.setdefault("data", {})[key] = base64.b64encode(value.encode()).decode()
    meta.update({"namespace": "lab", "uid": str(uuid.uuid4()), "creationTimestamp": now()})
    kept[kind][meta["name"]] = document
    if kind == "pods":
        document["status"] = {"phase": "Pending"}
        threading.Thread(target=live, args=(document,), daemon=True).start()
    return document


def now():
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def live(pod):
    """A pod's life: its volumes are there, its process runs, and its end is its phase."""
    name, spec = pod["metadata"]["name"], pod["spec"]
    mounted = DIR / "pods" / name
    mounted.mkdir(parents=True)
    for volume in spec.get("volumes", []):
        secret = None
        while secret is None and "deletionTimestamp" not in pod["metadata"]:
            with lock:
                secret = kept["secrets"].get(volume["secret"]["secretName"])
            time.sleep(0.05)
        for key, value in (secret or {}).get("data", {}).items():
            with open(os.open(mounted / key, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
                file.write(base64.b64decode(value))
    # The container's root is that of this machine, and its daemon one of the test's own.
    command = [word.replace("/agentd-join", str(mounted)).replace("${own:-}", "--user") for word in spec["containers"][0]["command"]]
    env = {"PATH": os.environ["PATH"], "HOME": str(mounted), "AGENTD_STATE_DIR": str(mounted / "state")}
    with open(DIR / "pods.log", "a") as log:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    with lock:
        pod["status"]["phase"] = "Running"
    while process.poll() is None:
        if "deletionTimestamp" in pod["metadata"]:
            os.killpg(process.pid, signal.SIGTERM)
        time.sleep(0.1)
    with lock:
        pod["status"]["phase"] = "Succeeded" if process.returncode == 0 else "Failed"
        while "deletionTimestamp" not in pod["metadata"]:
            lock.release()
            time.sleep(0.1)
            lock.acquire()
        del kept["pods"][name]
        owned = lambda secret: any(one["uid"] == pod["metadata"]["uid"] for one in secret["metadata"].get("ownerReferences", []))
        kept["secrets"] = {key: secret for key, secret in kept["secrets"].items() if not owned(secret)}


def listed(kind, query):
    wanted = dict(one.split("=", 1) for one in query.get("labelSelector", [""])[0].split(",") if one)
    fits = lambda one: wanted.items() <= one["metadata"].get("labels", {}).items()
    names = sorted(name for name, one in kept[kind].items() if fits(one))
    begin = query.get("continue", [""])[0]
    rest = [name for name in names if name > begin]
    page = rest[:PAGE]
    return {
        "kind": "List",
        "apiVersion": "v1",
        "metadata": {"continue": page[-1] if len(rest) > PAGE else ""},
        "items": [kept[kind][name] for name in page],
    }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        try:
            with lock:
                code, document = self.serve(json.loads(body) if body else None)
        except Refused as refused:
            code, document = refused.code, {"kind": "Status", "status": "Failure", "message": str(refused), "code": refused.code}
        data = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PATCH = do_DELETE = answer

    def serve(self, body):
        must(self.headers.get("Authorization") == "Bearer " + (DIR / "token").read_text(), 401, "Unauthorized")
        url = urlsplit(self.path)
        path = re.fullmatch(r"/api/v1/namespaces/([^/]+)/(pods|secrets)(?:/([^/]+))?", url.path)
        must(path, 404, "the server could not find the requested resource")
        space, kind, name = path.groups()
        must(space == "lab", 403, f'cannot use {kind} in the namespace "{space}"')
        query, verb = parse_qs(url.query), self.command
        if verb == "POST":
            must(not name, 405, "the server does not allow this method on the requested resource")
            must(self.headers.get("Content-Type") == "application/json", 415, "the media type is not supported")
            check(body, KINDS[kind], kind[:-1])
            must((body.get("apiVersion"), body.get("kind")) == ("v1", kind[:-1].capitalize()), 400, "the kind does not match")
            check_meta(body["metadata"])
            if kind == "pods":
                check_pod(body["spec"])
                must(not (DIR / "quota").exists(), 403, f'pods "{body["metadata"]["name"]}" is forbidden: exceeded quota: pods=2')
            must(body["metadata"]["name"] not in kept[kind], 409, f'{kind} "{body["metadata"]["name"]}" already exists')
            return 201, store(kind, body)
        if not name:
            must(verb == "GET", 405, "the server does not allow this method on the requested resource")
            return 200, listed(kind, query)
        must(name in kept[kind], 404, f'{kind} "{name}" not found')
        one = kept[kind][name]
        if verb == "PATCH":
            must(self.headers.get("Content-Type") == "application/merge-patch+json", 415, "the media type is not supported")
            check(body, KINDS[kind], kind[:-1])
            for key, value in body.pop("stringData", {}).items():
                one.setdefault("data", {})[key] = base64.b64encode(value.encode()).decode()
            one["metadata"].update(body.pop("metadata", {}))
            check_meta(one["metadata"])
            must(not body, 422, f"not changed here: {list(body)}")
        elif verb == "DELETE" and kind == "pods":
            must(str(query.get("gracePeriodSeconds", ["30"])[0]).isdigit(), 400, "gracePeriodSeconds must be a number")
            one["metadata"].setdefault("deletionTimestamp", now())
        elif verb == "DELETE":
            del kept[kind][name]
            return 200, {"kind": "Status", "status": "Success"}
        return 200, one

    def log_message(self, form, *words):
        with open(DIR / "api.log", "a") as log:
            log.write(form % words + "\n")


server = ThreadingHTTPServer(("127.0.0.1", PORT), Handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(DIR / "cert.pem", DIR / "key.pem")
server.socket = context.wrap_socket(server.socket, server_side=True)
print("ready", flush=True)
server.serve_forever()
