/** envelopes.json: signed, read, refused and verified. */

import { fromHex, toHex } from "../../../src/crowdml/web/device/bytes.js";
import * as envelopes from "../../../src/crowdml/web/device/envelopes.js";
import { keyFromSecret } from "../../../src/crowdml/web/device/keys.js";
import { check, equal, refused } from "./expect.js";

/**
 * @typedef {import("../../../src/crowdml/web/device/statements.js").Statement} Statement
 * @typedef {{ body: string, kind: string, sender: string, seq: number, statement: Statement, task: string,
 * to: string[] }} Shown
 * @typedef {{ name: string, secret: string, envelope: Shown, packed: string, signed: string, hash: string }} Valid
 * @typedef {{ name: string, signed: string, problem: string, public: string }} Broken
 */

/** @param {{ valid: Valid[], malformed: Broken[], forged: Broken[] }} vectors */
export function checks(vectors) {
  return [
    ...vectors.valid.map((row) => check(row.name, () => valid(row))),
    ...vectors.malformed.map((row) => check(row.name, () => malformed(row))),
    ...vectors.forged.map((row) => check(row.name, () => forged(row))),
  ];
}

/** @param {Valid} row */
async function valid(row) {
  const shown = row.envelope;
  const envelope = { ...shown, body: fromHex(shown.body), task: fromHex(shown.task) };
  const key = await keyFromSecret(fromHex(row.secret));
  equal(toHex(envelopes.packEnvelope(envelope)), row.packed, "the envelope's bytes");
  for (const data of [fromHex(row.signed), await envelopes.signEnvelope(envelope, key)]) {
    const { data: whole, ...found } = envelopes.openEnvelope(data);
    equal(found, envelope, "what it says");
    equal(await envelopes.verifyEnvelope({ data: whole, ...found }, key.public), true, "its signature");
  }
  equal(toHex(await envelopes.hashEnvelope(fromHex(row.signed))), row.hash, "its hash");
}

/** @param {Broken} row */
async function malformed(row) {
  equal((await refused(() => envelopes.openEnvelope(fromHex(row.signed)))).slug, row.problem, "the problem");
}

/** @param {Broken} row */
async function forged(row) {
  const signed = envelopes.openEnvelope(fromHex(row.signed));
  equal(await envelopes.verifyEnvelope(signed, fromHex(row.public)), false, "its signature");
}
