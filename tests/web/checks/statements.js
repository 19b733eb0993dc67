/** statements.json: whether a later statement names less, and losses in their one form. */

import { fromHex } from "../../../src/crowdml/web/device/bytes.js";
import { decode } from "../../../src/crowdml/web/device/codec.js";
import { isExact, readStatement, totalsFell } from "../../../src/crowdml/web/device/statements.js";
import { check, equal } from "./expect.js";

/** @param {{ name: string, before: string, now: string, fell: boolean }[]} vectors */
export function checks(vectors) {
  return [
    ...vectors.map((row) =>
      check(row.name, () => {
        const [before, now] = [row.before, row.now].map((hex) => readStatement(decode(fromHex(hex))));
        equal(totalsFell(before, now), row.fell, "whether it fell");
      })
    ),
    check("a loss has one form", () => {
      const exact = ["pure 1/10", "pure 0", "zcdp 3", "renyi 2:1/50,3:3/50", "renyi 2:0", "unbounded"];
      const others = [
        "pure 2/20",
        "pure 01",
        "pure 3/1",
        "pure -1",
        "zcdp",
        "renyi 3:1,2:2",
        "renyi 2:2,3:1",
        "renyi 1:1",
        "renyi 2",
        "pure 1/0",
        "unbounded ",
        "gauss 1",
      ];
      for (const text of exact) equal(isExact(text), true, text);
      for (const text of others) equal(isExact(text), false, text);
    }),
  ];
}
