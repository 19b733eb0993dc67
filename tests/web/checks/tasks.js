/** Tasks that a browser takes part in, and the sentences by which it refuses others. */

import { sha256, toUtf8 } from "../../../src/crowdml/web/device/bytes.js";
import { toText } from "../../../src/crowdml/web/device/fractions.js";
import { readJson } from "../../../src/crowdml/web/device/json.js";
import { readTask } from "../../../src/crowdml/web/device/tasks.js";
import { planOf } from "../../../src/crowdml/web/device/turn.js";
import { check, equal, holds, refused } from "./expect.js";

/** @typedef {{ [key: string]: unknown }} Table */

const TASK = {
  as_published: false,
  collects: "",
  features: { dimension: 3, kind: "vector", norm: { bound: 1, kind: "l2" } },
  labels: { bound: 1, classes: ["a", "b"], kind: "class" },
  model: { kind: "softmax" },
  name: "t",
  privacy: {
    budget: { epsilon: 1, samples: 100 },
    delta: 1e-6,
    epsilon: { gradient: 0.9 },
    grid: null,
    mechanism: "discrete-gaussian",
    unit: "sample",
  },
  protocol: { batch: 4, kind: "sgd", step: { c: 1 } },
  purpose: "",
  stop: { error: null, steps: null },
  title: "",
};

/** Sorted keys and no blanks. @param {unknown} value @returns {string} */
function canonical(value) {
  if (Array.isArray(value)) return `[${value.map(canonical).join(",")}]`;
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  const entries = Object.entries(value).filter(([, each]) => each !== undefined).toSorted((
    [a],
    [b],
  ) => (a < b ? -1 : 1));
  return `{${entries.map(([key, each]) => `${JSON.stringify(key)}:${canonical(each)}`).join(",")}}`;
}

/** @param {Table} changes tables are changed key by key */
function changed(changes) {
  const all = Object.entries(changes).map(([key, value]) => {
    const old = /** @type {Table} */ (TASK)[key];
    const both = value && typeof value === "object" && old && typeof old === "object" && !Array.isArray(value);
    return [key, both ? { ...old, ...value } : value];
  });
  return toUtf8(canonical({ ...TASK, ...Object.fromEntries(all) }));
}

/** @type {[Table, string][]} */
const REFUSED = [
  [{ protocol: { kind: "admm" } }, 'protocol.kind is "admm"'],
  [{ model: { kind: "ridge" }, protocol: { kind: "gram", step: undefined } }, "[masking]"],
  [{ model: { kind: "ridge" }, protocol: { kind: "gram", map: { kind: "convolution" }, step: undefined } }, "map.kind"],
  [{ protocol: { kind: "gram" } }, "protocol.step"],
  [{ protocol: { kind: "secprobe" } }, '"secprobe"'],
  [{ protocol: undefined }, "protocol"],
  [{ protocol: { combine: { rule: "median", uploads: 11 } } }, "protocol.combine"],
  [{ protocol: { clip: 0 } }, "protocol.clip is not above zero"],
  [{ protocol: { held_out: 4 } }, "held_out"],
  [{ protocol: { batch: 0 } }, "protocol.batch"],
  [{ features: { kind: "windows" } }, "features.kind"],
  [{ features: { extractor: { pixels: 4, sha256: "00" } } }, "features.extractor"],
  [{ features: { kind: "accelerometer-spectrum" } }, "64 numbers"],
  [{ features: { low: 0 } }, "features.low and features.high"],
  [{ labels: { kind: "number" } }, "labels.kind"],
  [{ labels: { classes: ["a"] } }, "labels.classes"],
  [{ labels: { bins: [1] } }, "labels.bins"],
  [{ model: { kind: "cnn" } }, '"cnn"'],
  [{ model: { kind: "logistic", plugin: "x" } }, "model.plugin"],
  [{ model: { l2: -1 } }, "model.l2"],
  [{ privacy: { mechanism: "none" } }, "privacy.mechanism"],
  [{ privacy: { mechanism: "skellam" } }, "[masking]"],
  [{ privacy: { delta: 1e-3 } }, "privacy.delta"],
  [{ privacy: { delta: 0 } }, "delta"],
  [{ privacy: { epsilon: { gradient: 0.9, update: 1 } } }, "no update"],
  [{ privacy: { epsilon: {} } }, "privacy.epsilon.gradient"],
  [{ privacy: { grid: 0.3 } }, "privacy.grid"],
  [{ privacy: { grid: 2 ** -14 } }, "too fine"],
  [{ privacy: { epsilon: { gradient: 1e-7 } } }, "privacy.epsilon"],
  [{ privacy: { mechanism: "discrete-laplace" } }, "l1"],
  [{ privacy: { unit: "device" } }, "sample"],
  [{ as_published: true }, "simulator"],
  [{ places: [] }, "places"],
  [{ title: null }, "title"],
];

export function checks() {
  return [
    check("a task is read, and no other than the one that was joined", async () => {
      const data = changed({});
      const task = await readTask(data, await sha256(data));
      equal([task.name, task.classes, task.privacy.delta, toText(task.privacy.epsilon.gradient)], [
        "t",
        2,
        1e-6,
        "9/10",
      ]);
      equal((await planOf(task)).batch, 4, "the batch");
      equal((await refused(() => readTask(data, new Uint8Array(32)))).slug, "wrong-task", "another hash");
    }),
    ...REFUSED.map(([changes, word]) =>
      check(`refused: ${JSON.stringify(changes)}`, async () => {
        const error = await refused(async () => await planOf(await readTask(changed(changes))));
        equal(["invalid-task", "malformed"].includes(error.slug ?? ""), true, `a sentence in ${error}`);
        holds(error.message.includes(word), `${error.message} says ${word}`);
      })
    ),
    check("JSON in another form is refused", async () => {
      const others = [
        '{"b":1,"a":2}',
        '{"a":1,"a":2}',
        '{"a": 1}',
        "[1,]",
        '{"a"}',
        "01",
        "1.",
        '"\\x"',
        "tru",
        "[1]]",
        "",
      ];
      for (const text of [...others, "[".repeat(20), "99999999999999999999"]) {
        equal((await refused(() => readJson(toUtf8(text)))).slug, "malformed", text);
      }
      equal(readJson(toUtf8('{"__proto__":[true,null,"\\u00e9"],"z":{}}')), {
        ["__proto__"]: [true, null, "é"],
        z: {},
      });
    }),
  ];
}
