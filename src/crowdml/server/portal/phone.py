"""The browser as a device: whether it can take part in a task, and the page on which it goes on."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from crowdml.server.portal import assets
from crowdml.server.portal.pages import language, render
from crowdml.server.portal.studies import Study
from crowdml.server.portal.words import Words
from crowdml.task import Task

PROTOCOLS = ("sgd", "local_updates")
FEATURES = ("vector", "accelerometer-spectrum")
MODELS = ("softmax", "logistic", "svm", "mlp")
SPOKEN = "phone.live."
"""The sentences that the phone's scripts say: the page carries them."""


async def page(request: Request) -> Response:
    """GET /phone: where a phone that takes part goes on. It says nothing of any study: the browser knows its own."""
    return render(request, "phone.html", headers={"Cache-Control": "no-store"}, **parts(request))


def parts(request: Request) -> dict[str, Any]:
    """What a page with the phone's part needs: the words of its scripts, and the modules that it loads first."""
    modules = assets.needed("phone/page.js", "device/worker.js")
    return {"phone_words": spoken(language(request)), "hindrance": hindrance, "modules": modules}


def spoken(said: Words) -> str:
    """The catalogue's sentences for scripts, as JSON."""
    own = {name.removeprefix(SPOKEN): text for name, text in said.sentences.items() if name.startswith(SPOKEN)}
    return json.dumps(own, ensure_ascii=False)


def hindrance(study: Study) -> str | None:
    """Why no browser can take part in a study, by its name in the catalogue; None where one can.

    The browser reads the task itself before its owner is asked, and refuses what this does not know of.
    """
    task = study.task
    if study.state == "stopped":
        return "ended"
    if task.masking is not None:
        return "masks"
    if study.plugins or task.protocol.get("kind") not in PROTOCOLS or task.model.get("kind") not in MODELS:
        return "protocol"
    if task.features.kind not in FEATURES or task.features.extractor is not None or task.classes is None:
        return "features"
    return None if _bounded(task) else "budget"


def _bounded(task: Task) -> bool:
    return task.privacy.budget is not None and task.features.norm.kind != "none"
