/**
 * Receipts: the server's signed word that a check-in is on its disk, and the chain that binds it to the journal.
 * Mirrors src/crowdml/wire/receipts.py.
 *
 * @typedef {import("./bytes.js").Bytes} Bytes
 * @typedef {object} Receipt
 * @property {Bytes} task
 * @property {string} device
 * @property {number | bigint} seq
 * @property {number | bigint} index its place in the task's journal, from 1
 * @property {Bytes} hash SHA-256 of the signed envelope
 * @property {Bytes} chain the journal's chain at this check-in
 * @property {Bytes} path
 * @property {Bytes} signature
 */

import { bigEndian64, concat, equalBytes, sha256, toUtf8 } from "./bytes.js";
import { asBytes, asInteger, asMap, asText, decode, encode } from "./codec.js";
import { SIGNATURE_SIZE, verify } from "./keys.js";
import { malformed } from "./problems.js";

const JOURNAL_PREFIX = toUtf8("crowdml/journal/1");
const RECEIPTS_PREFIX = toUtf8("crowdml/receipts/1");
const STEP = 33; // bytes of a step on a path: the side of the other hash, 0 left or 1 right, and that hash
const MOST_STEPS = 20;
const KEYS = ["chain", "device", "hash", "index", "path", "seq", "signature", "task"];
const LARGEST_NUMBER = 2n ** 63n - 1n;

/** What the bytes say, if their structure is right. @param {Uint8Array} data @returns {Receipt} */
export function openReceipt(data) {
  const found = asMap(decode(data), KEYS, "The receipt");
  const device = asText(found.device, "device", 32);
  if (!/^[0-9a-f]{32}$/.test(device)) malformed("device is not a device id.");
  return {
    chain: asBytes(found.chain, "chain", { size: 32 }),
    device,
    hash: asBytes(found.hash, "hash", { size: 32 }),
    index: asInteger(found.index, "index", 1, LARGEST_NUMBER),
    path: readPath(asBytes(found.path, "path", { most: MOST_STEPS * STEP })),
    seq: asInteger(found.seq, "seq", 1, LARGEST_NUMBER),
    signature: asBytes(found.signature, "signature", { size: SIGNATURE_SIZE }),
    task: asBytes(found.task, "task", { size: 32 }),
  };
}

/** @param {Bytes} path */
function readPath(path) {
  const sides = Array.from({ length: Math.ceil(path.length / STEP) }, (_, step) => path[step * STEP]);
  if (path.length % STEP || sides.some((side) => side > 1)) malformed("path must be steps of 33 bytes.");
  return path;
}

/** Whether the server whose key this is signed the root that the receipt's path leads to.
 * @param {Receipt} receipt @param {Bytes} serverKey @returns {Promise<boolean>} */
export async function verifyReceipt({ path, signature, ...said }, serverKey) {
  let root = await sha256(concat(Uint8Array.of(0), encode(said)));
  for (let at = 0; at < path.length; at += STEP) {
    const other = path.subarray(at + 1, at + STEP);
    root = await sha256(path[at] ? concat(Uint8Array.of(1), root, other) : concat(Uint8Array.of(1), other, root));
  }
  return verify(serverKey, signature, concat(RECEIPTS_PREFIX, root));
}

/** Whether it is the receipt for this check-in and no other. @param {Receipt} receipt
 * @param {{ task: Bytes, device: string, seq: number | bigint, hash: Bytes }} sent */
export function answers(receipt, { task, device, seq, hash }) {
  const same = receipt.device === device && BigInt(receipt.seq) === BigInt(seq);
  return same && equalBytes(receipt.task, task) && equalBytes(receipt.hash, hash);
}

/** The journal's chain before the first check-in of a task. @param {Bytes} task */
export function chainStart(task) {
  return sha256(concat(JOURNAL_PREFIX, task));
}

/** The chain after one more check-in. @param {Bytes} chain
 * @param {{ task: Bytes, device: string, seq: number | bigint, hash: Bytes }} sent */
export function chainNext(chain, { task, device, seq, hash }) {
  return sha256(concat(chain, task, toUtf8(device), bigEndian64(seq), hash));
}
