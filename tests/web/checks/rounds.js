/**
 * rounds.json: a whole round of five devices of which one vanishes. What each device says is held against the vectors,
 * but for sealed letters: Python seals with ChaCha20-Poly1305 as yet, so a table stands in for the seal here.
 */

import { concat, fromHex, sha256, toHex, toUtf8 } from "../../../src/crowdml/web/device/bytes.js";
import { decode, encode } from "../../../src/crowdml/web/device/codec.js";
import { planGraph } from "../../../src/crowdml/web/device/graph.js";
import { keyFromSecret } from "../../../src/crowdml/web/device/keys.js";
import * as ring from "../../../src/crowdml/web/device/ring.js";
import { bitmap, members, publicationHash } from "../../../src/crowdml/web/device/roster.js";
import * as secagg from "../../../src/crowdml/web/device/secagg.js";
import { seal, unseal } from "../../../src/crowdml/web/device/sealed.js";
import { joinShares, splitSecrets } from "../../../src/crowdml/web/device/shamir.js";
import { openView } from "../../../src/crowdml/web/device/views.js";
import { check, equal, holds, refused } from "./expect.js";

/**
 * @typedef {{ tag: string, length: number, bits: 32 | 64 }} Field
 * @typedef {{ secret: string, id: string, root: string, vectors: { [tag: string]: number[] } }} Device
 * @typedef {{ from: string, to: string, kind: string, body: string }} Said
 * @typedef {{ round: number, phase: string, kind: string, body: string, closes: number, wait: number, why: string,
 *   publication: { version: number, kind: string, body: string } | null, encoded: string }} View
 * @typedef {{ task: string, round: number, smallest: number, largest: number, survivors: number, colluders: number,
 *   views: View[], fields: Field[], devices: Device[], missing: string, publication_hash: string,
 *   messages: Said[] }} Vectors
 * @typedef {import("../../../src/crowdml/web/device/secagg.js").Round} Round
 */

/** @param {Vectors} vectors */
export function checks(vectors) {
  return [
    check("every device says in every phase what it must", () => wholeRound(vectors)),
    check("a device says nothing where a message is not what it must be", () => lies(vectors)),
    check("a sealed letter opens for its holder alone", sealedLetters),
    check("any threshold of shares gives the secret back, and a wrong one does not", shares),
    check("elements of 64 bits add up and cancel in two halves", halves),
    check("plans are those of the table in docs/secagg.md", plans),
    ...vectors.views.map((row) =>
      check(`a view in the phase ${row.phase}`, () => viewed(row, vectors.publication_hash))
    ),
    check("a view that is none is refused", async () => {
      const view = {
        body: new Uint8Array(),
        closes: 0,
        kind: "",
        phase: "mask",
        publication: [],
        round: 1,
        wait: 0,
        why: "",
      };
      equal(openView(encode(view)).phase, "mask", "a view");
      /** @type {{ [key: string]: import("../../../src/crowdml/web/device/codec.js").Plain }[]} */
      const wrong = [{ phase: "sum" }, { round: 0 }, { wait: -1 }, { publication: [1] }, { why: null }, { more: 1 }];
      for (const change of wrong) await refused(() => openView(encode({ ...view, ...change })));
    }),
    check("bitmaps have one form", async () => {
      equal(toHex(bitmap([true, false, false, false, false, false, false, true, true])), "8180", "the bits");
      equal(members(fromHex("8180"), 9).map(Number), [1, 0, 0, 0, 0, 0, 0, 1, 1], "who is in it");
      for (const [hex, devices] of [["81", 9], ["8140", 9], ["818000", 9]]) {
        await refused(() => members(fromHex(/** @type {string} */ (hex)), /** @type {number} */ (devices)));
      }
    }),
  ];
}

/** @param {Vectors} vectors */
function setting(vectors) {
  /** @type {Map<string, Uint8Array<ArrayBuffer>>} */
  const table = new Map();
  /** @type {secagg.Sealing} */
  const letters = {
    seal: async (_, __, sender, holder, content) => {
      table.set(`${sender} ${holder}`, content);
      return concat(content, new Uint8Array(16));
    },
    unseal: async (_, __, sender, holder) => table.get(`${sender} ${holder}`) ?? null,
  };
  const terms = { ...vectors, task: fromHex(vectors.task) };
  /** @param {string} kind @param {"from" | "to"} end @param {string} id */
  const body = (kind, end, id) => {
    const found = vectors.messages.find((each) => each.kind === kind && each[end] === id);
    return fromHex(found?.body ?? "");
  };
  return { letters, terms, body };
}

/** @param {Vectors} vectors */
async function begun(vectors) {
  const { letters, terms, body } = setting(vectors);
  const rounds = vectors.devices.map(async (device) => {
    const key = await keyFromSecret(fromHex(device.secret));
    const first = await secagg.advertise(terms, vectors.round, key, vectors.round - 1, () => fromHex(device.root));
    const said = body("secagg/advert/1", "from", device.id);
    equal({ .../** @type {object} */ (decode(first.sent)), signature: 0 }, {
      .../** @type {object} */ (decode(said)),
      signature: 0,
    });
    return { device, key, state: { ...first, sent: said } }; // the vector's: another signature has another hash
  });
  return { letters, terms, body, rounds: await Promise.all(rounds) };
}

/** @param {Vectors} vectors */
async function wholeRound(vectors) {
  const { letters, terms, body, rounds } = await begun(vectors);
  for (const each of rounds) {
    each.state = await secagg.share(terms, each.state, body("secagg/cohort/1", "to", each.device.id), letters);
  }
  const publication = fromHex(vectors.publication_hash);
  for (const each of rounds) {
    const { id, vectors: values } = each.device;
    each.state = await secagg.hold(terms, each.state, body("secagg/held/1", "to", id), publication, letters);
    each.state = await secagg.mask(terms, each.state, values);
    if (id !== vectors.missing) {
      equal(toHex(each.state.sent), toHex(body("secagg/masked/1", "from", id)), "under masks");
    }
  }
  for (const each of rounds.filter(({ device }) => device.id !== vectors.missing)) {
    const { id } = each.device;
    each.state = await secagg.agree(terms, each.state, each.key, body("secagg/survivors/1", "to", id));
    const [said, wanted] = [each.state.sent, body("secagg/agreement/1", "from", id)];
    equal(said.length, wanted.length, "the agreement");
    each.state = await secagg.reveal(terms, each.state, body("secagg/agreements/1", "to", id));
    equal(toHex(each.state.sent), toHex(body("secagg/reveal/1", "from", id)), "what is revealed");
    equal([each.state.root.length, each.state.shares.length], [0, 0], "the secrets that are left");
  }
}

/** @param {Vectors} vectors */
async function lies(vectors) {
  const { letters, terms, body, rounds } = await begun(vectors);
  const [{ device, key, state }] = rounds;
  const cohort = body("secagg/cohort/1", "to", device.id);
  const broken = cohort.slice();
  broken[40] ^= 1; // in a neighbour's keys
  const wrong = [
    () => secagg.advertise(terms, 7, key, 7),
    () => secagg.share(terms, state, broken, letters),
    () => secagg.share({ ...terms, smallest: 6, largest: 6, survivors: 6 }, state, cohort, letters),
    () => secagg.share(terms, { ...state, round: 8 }, cohort, letters),
    () => secagg.share(terms, { ...state, root: new Uint8Array() }, cohort, letters),
    () => secagg.share(terms, { ...state, sent: fromHex("80") }, cohort, letters),
    () => secagg.mask(terms, state, device.vectors),
    () => secagg.agree(terms, state, key, body("secagg/survivors/1", "to", device.id)),
  ];
  for (const run of wrong) await refused(run);
  const swapped = await otherKeys(vectors, terms, rounds[1].key, cohort);
  holds((await refused(() => secagg.share(terms, state, swapped, letters))).message.includes("signed"), "other keys");
  const shared = await secagg.share(terms, state, cohort, letters);
  await refused(() => secagg.share(terms, shared, cohort, letters));
  for (const each of rounds.slice(1)) {
    await secagg.share(terms, each.state, body("secagg/cohort/1", "to", each.device.id), letters);
  }
  const held = await secagg.hold(terms, shared, body("secagg/held/1", "to", device.id), new Uint8Array(32), letters);
  await refused(() => secagg.mask(terms, held, { gradient: [1, 2, 3] }));
  await refused(() => secagg.mask(terms, held, { gradient: [1, 2], counts: [1, 2] }));
  const masked = await secagg.mask(terms, held, device.vectors);
  await refused(() => secagg.mask(terms, masked, device.vectors));
  holds(toHex(masked.sent) !== toHex(body("secagg/masked/1", "from", device.id)), "another publication, other masks");
  for (const bits of [[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]) {
    await refused(() => secagg.agree(terms, masked, key, list(bits))); // it is called missing; too few survived
  }
  const withoutOne = { ...masked, sharers: bitmap([true, true, true, true, false]) };
  await refused(() => secagg.agree(terms, withoutOne, key, list([1, 1, 1, 1, 1]))); // the last delivered no shares
  const agreed = await secagg.agree(terms, masked, key, body("secagg/survivors/1", "to", device.id));
  const error = await refused(() => secagg.reveal(terms, agreed, body("secagg/agreements/1", "to", device.id)));
  holds(error.message.includes("signed"), "nobody else agreed to another publication");
}

/** @param {View} row @param {string} hash of the publication */
async function viewed({ encoded, ...wanted }, hash) {
  const { body, publication, ...rest } = openView(fromHex(encoded));
  const offered = publication && { ...publication, body: toHex(publication.body) };
  equal({ ...rest, body: toHex(body), publication: offered }, wanted, "the view");
  if (publication === null) return;
  const found = await publicationHash(publication.version, publication.kind, publication.body);
  equal(toHex(found), hash, "the publication's hash");
}

/** The server's list of survivors. @param {number[]} bits */
function list(bits) {
  return encode({ round: 7, survivors: bitmap(bits.map(Boolean)) });
}

/** The cohort's message with other keys of the first neighbour, which it signed for this round, too.
 * @param {Vectors} vectors @param {import("../../../src/crowdml/web/device/roster.js").Terms} terms
 * @param {import("../../../src/crowdml/web/device/keys.js").Key} key @param {Uint8Array} cohort */
async function otherKeys(vectors, terms, key, cohort) {
  const other = await secagg.advertise(terms, vectors.round, key, 0, (size) => new Uint8Array(size).fill(3));
  const { pair, seal: sealing, commitment, signature } =
    /** @type {{ [name: string]: Uint8Array }} */ (decode(other.sent));
  const said = /** @type {{ [name: string]: Uint8Array }} */ (decode(cohort));
  const adverts = concat(pair, sealing, commitment, signature, said.adverts.slice(160));
  return encode({ round: vectors.round, roster: said.roster, adverts });
}

async function sealedLetters() {
  const [secret, salt] = [await sha256(toUtf8("secret")), await sha256(toUtf8("salt"))];
  const content = new Uint8Array(72).fill(5);
  const letter = await seal(secret, salt, "a", "b", content);
  equal(letter.length, 88, "its bytes");
  equal(await unseal(secret, salt, "a", "b", letter), content, "what the holder reads");
  equal(await unseal(secret, salt, "b", "a", letter), null, "what another reads");
  letter[3] ^= 1;
  equal(await unseal(secret, salt, "a", "b", letter), null, "of a letter that was changed");
}

async function shares() {
  const secret = await sha256(toUtf8("a secret"));
  const points = [1, 2, 5, 9, 70];
  const coins = await sha256(toUtf8("coins"));
  const found = splitSecrets(
    [secret, secret],
    3,
    points,
    (size) => Uint8Array.from({ length: size }, (_, at) => coins[at % 32] ^ at),
  );
  const first = found.map((share) => share.slice(0, 36));
  for (const chosen of [[0, 1, 2], [4, 2, 0], [1, 3, 4]]) {
    equal(joinShares(chosen.map((at) => points[at]), chosen.map((at) => first[at])), secret, `of ${chosen}`);
  }
  holds(
    toHex(joinShares([1, 2, 5], [first[0], first[1], first[3]]) ?? new Uint8Array()) !== toHex(secret),
    "a wrong share",
  );
  await refused(() => splitSecrets([secret], 6, points, () => new Uint8Array()));
  await refused(() => splitSecrets([secret], 1, [0, 1], () => new Uint8Array()));
}

function halves() {
  const values = [0, 1, -1, 2 ** 31, -(2 ** 40) + 3, 2 ** 52];
  const words = ring.toElements(values, 64);
  equal(ring.fromElements(words, 64), values.map(BigInt), "there and back");
  const stream = crypto.getRandomValues(new Uint32Array(words.length));
  const before = words.slice();
  ring.addTo(words, stream, 64);
  const both = ring.fromElements(words, 64);
  const wanted = ring.fromElements(stream, 64).map((each, at) => BigInt.asIntN(64, each + BigInt(values[at])));
  equal(both, wanted, "a sum");
  ring.takeFrom(words, stream, 64);
  equal(words, before, "without the mask");
  equal(ring.fromElements(ring.toElements([-1, 2 ** 31 - 1, -(2 ** 31)], 32), 32), [-1n, 2n ** 31n - 1n, -(2n ** 31n)]);
}

function plans() {
  /** @type {[number, number, number, number, number, number][]} */
  const table = [[100, 5, 70, 99, 53, 53], [1000, 50, 800, 274, 178, 526], [1000, 100, 700, 654, 411, 551]];
  for (const [devices, colluders, survivors, neighbours, threshold, quorum] of table) {
    const plan = planGraph(devices, colluders, survivors);
    equal([plan?.neighbours, plan?.threshold, plan?.quorum], [neighbours, threshold, quorum], `${devices} devices`);
  }
  equal(planGraph(10, 3, 6), null, "without a safe threshold");
}
