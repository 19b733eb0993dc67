/**
 * A device's side of a masked round: six steps, each from a state and a message to the next state.
 *
 * `state.sent` is what a step says: keep the state, then send it, and send the same bytes until they are acknowledged.
 * All chance comes from `root`, drawn once when the round begins, so that a device which was closed repeats itself and
 * never says a second thing. A step that raises changed nothing and said nothing. Mirrors src/crowdml/secagg/device.py;
 * what a device makes sure of is in docs/secagg.md, under "Who enforces what".
 *
 * @typedef {import("./bytes.js").Bytes} Bytes
 * @typedef {import("./codec.js").Plain} Plain
 * @typedef {import("./keys.js").Key} Key
 * @typedef {import("./roster.js").Roster} Roster
 * @typedef {import("./roster.js").Terms} Terms
 * @typedef {"advertised" | "shared" | "held" | "masked" | "agreed" | "revealed"} Phase
 *
 * @typedef {object} Round all that a device keeps of a round
 * @property {string} me
 * @property {number} round
 * @property {Phase} phase
 * @property {Bytes} root
 * @property {Bytes} roster
 * @property {Bytes} adverts of its neighbours
 * @property {Bytes} sharers
 * @property {Bytes} publication its hash
 * @property {readonly (Bytes | null)[]} shares what neighbours sealed for this device; null: it did not open
 * @property {Bytes} survivors
 * @property {Bytes} sent
 *
 * @typedef {object} Sealing
 * @property {(secret: Bytes, salt: Bytes, sender: string, holder: string, content: Bytes) => Promise<Bytes>} seal
 * @property {(secret: Bytes, salt: Bytes, sender: string, holder: string, sealed: Bytes) => Promise<Bytes | null>}
 * unseal
 *
 * @typedef {{ public: Bytes, pair: Bytes, seal: Bytes, commitment: Bytes, signature: Bytes }} Advert
 */

import { concat, equalBytes, sha256, toUtf8 } from "./bytes.js";
import { asBytes, asCount, asMap, decode, encode } from "./codec.js";
import { neighboursOf } from "./graph.js";
import { agree as agreeOn, agreementKeyFromSecret, sign, SIGNATURE_SIZE, verify } from "./keys.js";
import { addStream, derive, pairKey, saltOf, selfKey, streamOf } from "./masks.js";
import { systemEntropy } from "./noise.js";
import { Problem } from "./problems.js";
import { elementBytes, toElements } from "./ring.js";
import { bitmap, members, readRoster, viewOf } from "./roster.js";
import { seal, SEALED_SIZE, unseal } from "./sealed.js";
import { SHARE_SIZE, splitSecrets } from "./shamir.js";

const ADVERT_BODY = 32 + 32 + 32 + SIGNATURE_SIZE;
const SPARE = 4096; // bytes of coins beyond what shares need: a value outside the field is drawn again
const NONE = new Uint8Array();
const ANY_SCALAR = new Uint8Array(32).fill(7);
/** @type {Sealing} */
const SEALING = { seal, unseal };

/** Take part in a round: fresh keys, signed. `after` is the last round of this task that the device ever began; it is
 * on disk. @param {Terms} terms @param {number} round @param {Key} key @param {number} after
 * @param {(size: number) => Uint8Array} [entropy] @returns {Promise<Round>} */
export async function advertise(terms, round, key, after, entropy = systemEntropy) {
  if (round <= after) refuse(`Round ${round} was offered after round ${after}.`);
  const root = new Uint8Array(entropy(32));
  const { pair, sealing, seed } = await secretsOf(terms, { root, round });
  const commitment = await sha256(concat(toUtf8("crowdml/secagg/seed/1"), seed));
  const keys = { pair: pair.public, seal: sealing.public, commitment };
  const signature = await sign(key, advertBytes(terms, round, keys));
  const sent = encode({ ...keys, public: key.public, round, signature });
  const none = { roster: NONE, adverts: NONE, sharers: NONE, publication: NONE, shares: [], survivors: NONE };
  return { me: key.id, round, phase: "advertised", root, ...none, sent };
}

/** Look at the cohort, and share both secrets among the neighbours in it. @param {Terms} terms @param {Round} state
 * @param {Bytes} message secagg/cohort/1 @param {Sealing} [letters] @returns {Promise<Round>} */
export async function share(terms, state, message, letters = SEALING) {
  const { adverts, roster: data } = opened(state, "advertised", message, ["adverts", "roster"]);
  const roster = await readRoster(terms, state.round, data);
  const own = roster.ids.indexOf(state.me);
  if (own < 0 || !equalBytes(roster.adverts[own], await sha256(state.sent))) {
    refuse("This device, with the keys that it advertised, is not in the cohort that it was shown.");
  }
  const neighbours = await neighboursOf(roster.ids, roster.hash, own, roster.plan);
  if (adverts.length !== neighbours.length * ADVERT_BODY) {
    refuse("The keys of this device's neighbours are not all here.");
  }
  const { sealing } = await secretsOf(terms, state);
  const contents = await contentsOf(terms, state, roster, neighbours);
  const sealed = neighbours.map(async (peer, at) => {
    const advert = await checkedAdvert(terms, state.round, roster, peer, adverts, at);
    const secret = await agreeOn(sealing, advert.seal);
    return letters.seal(secret, roster.sealing, state.me, roster.ids[peer], contents[at]);
  });
  const sent = encode({ round: state.round, sealed: concat(...(await Promise.all(sealed))) });
  return { ...state, phase: "shared", roster: data, adverts, sent };
}

/** The shares of this device's two secrets, one pair for each neighbour. @param {Terms} terms @param {Round} state
 * @param {Roster} roster @param {readonly number[]} neighbours @returns {Promise<Bytes[]>} */
export async function contentsOf(terms, state, roster, neighbours) {
  const { pairSecret, seed } = await secretsOf(terms, state);
  const { threshold } = roster.plan;
  const size = 4 * (threshold - 1) * 2 * (SHARE_SIZE / 4) + SPARE;
  const coins = await streamOf(await derive(state.root, roster.hash, "coefficients"), size);
  let used = 0;
  /** @param {number} wanted */
  const entropy = (wanted) => coins.subarray(used, used += wanted);
  return splitSecrets([pairSecret, seed], threshold, neighbours.map((peer) => peer + 1), entropy);
}

/** A neighbour's keys, which it signed for this task and round. @param {Terms} terms @param {number} round
 * @param {Roster} roster @param {number} peer @param {Bytes} adverts @param {number} at @returns {Promise<Advert>} */
async function checkedAdvert(terms, round, roster, peer, adverts, at) {
  const advert = advertAt(roster, peer, adverts, at);
  const { public: publicKey, signature, ...keys } = advert;
  const hash = await sha256(encode({ ...advert, round }));
  const signed = await verify(publicKey, signature, advertBytes(terms, round, keys));
  if (!signed || !equalBytes(hash, roster.adverts[peer])) {
    refuse(`The keys of neighbour ${roster.ids[peer]} are not those that it signed for this round.`);
  }
  await agreeOn(await agreementKeyFromSecret(ANY_SCALAR), advert.pair); // refuses a point of low order
  return advert;
}

/** @param {Roster} roster @param {number} peer @param {Bytes} adverts @param {number} at @returns {Advert} */
function advertAt(roster, peer, adverts, at) {
  const body = adverts.slice(at * ADVERT_BODY, (at + 1) * ADVERT_BODY);
  const [pair, sealing, commitment] = [0, 32, 64].map((begin) => body.slice(begin, begin + 32));
  return { public: roster.publics[peer], pair, seal: sealing, commitment, signature: body.slice(96) };
}

/** Take the neighbours' shares. Nothing is said; now the device may draw its noise and mask. `publication` is the
 * hash of what it was shown to work with. A letter that does not open is left out. @param {Terms} terms
 * @param {Round} state
 * @param {Bytes} message secagg/held/1 @param {Bytes} publication @param {Sealing} [letters]
 * @returns {Promise<Round>} */
export async function hold(terms, state, message, publication, letters = SEALING) {
  const { sealed, sharers } = opened(state, "shared", message, ["sealed", "sharers"]);
  const { roster, own, neighbours } = await surroundings(terms, state);
  const delivered = members(sharers, roster.ids.length);
  const present = neighbours.filter((peer) => delivered[peer]);
  if (!delivered[own]) refuse("This device delivered its shares, and is said not to have.");
  const enough = delivered.filter(Boolean).length >= roster.plan.survivors && present.length >= roster.plan.threshold;
  if (!enough) refuse("Too few devices delivered shares. Nothing was masked.");
  if (sealed.length !== present.length * SEALED_SIZE) refuse("The letters are not as many as the neighbours.");
  const { sealing } = await secretsOf(terms, state);
  const shares = present.map(async (peer, at) => {
    const advert = advertAt(roster, peer, state.adverts, neighbours.indexOf(peer));
    const secret = await agreeOn(sealing, advert.seal);
    const letter = sealed.slice(at * SEALED_SIZE, (at + 1) * SEALED_SIZE);
    return letters.unseal(secret, roster.sealing, roster.ids[peer], state.me, letter);
  });
  return { ...state, phase: "held", sharers, publication, shares: await Promise.all(shares), sent: NONE };
}

/** Mask the integers of this round, noise included: one vector for each field of the terms. This is done once.
 * @param {Terms} terms @param {Round} state @param {{ readonly [tag: string]: ArrayLike<number> }} vectors
 * @returns {Promise<Round>} */
export async function mask(terms, state, vectors) {
  if (state.phase !== "held") refuse(`This device has ${state.phase}; it masks once, after it holds shares.`);
  const { roster, neighbours } = await surroundings(terms, state);
  const view = await viewOf(roster, state.sharers, state.publication);
  const salt = await saltOf(terms.task, state.round, view);
  const { pair, seed } = await secretsOf(terms, state);
  const delivered = members(state.sharers, roster.ids.length);
  const peers = neighbours.filter((peer) => delivered[peer]).map(async (peer) => {
    const advert = advertAt(roster, peer, state.adverts, neighbours.indexOf(peer));
    return { id: roster.ids[peer], secret: await agreeOn(pair, advert.pair) };
  });
  const body = await maskVectors(terms, vectors, salt, state.me, seed, await Promise.all(peers));
  return { ...state, phase: "masked", sent: encode({ body, round: state.round, view }) };
}

/** Every field as elements, plus the device's own stream, plus or minus one for each neighbour. @param {Terms} terms
 * @param {{ readonly [tag: string]: ArrayLike<number> }} vectors @param {Bytes} salt @param {string} me
 * @param {Bytes} seed @param {readonly { id: string, secret: Bytes }[]} peers @returns {Promise<Bytes>} */
export async function maskVectors(terms, vectors, salt, me, seed, peers) {
  if (Object.keys(vectors).length !== terms.fields.length) refuse("The vectors are not those of the terms.");
  /** @type {Bytes[]} */
  const parts = [];
  for (const { tag, length, bits } of terms.fields) {
    if (vectors[tag]?.length !== length) refuse(`${tag} has ${length} entries in the terms.`);
    const elements = toElements(vectors[tag], bits);
    await addStream(elements, bits, await selfKey(seed, salt, me, tag), 1);
    for (const { id, secret } of peers) {
      await addStream(elements, bits, await pairKey(secret, salt, me, id, tag), me < id ? 1 : -1);
    }
    parts.push(elementBytes(elements));
  }
  return concat(...parts);
}

/** Look at the list of survivors, and sign it if it keeps to the terms. A device signs one list a round.
 * @param {Terms} terms @param {Round} state @param {Key} key @param {Bytes} message secagg/survivors/1
 * @returns {Promise<Round>} */
export async function agree(terms, state, key, message) {
  const { survivors } = opened(state, "masked", message, ["survivors"]);
  const { roster, own, neighbours } = await surroundings(terms, state);
  const [alive, delivered] = [survivors, state.sharers].map((data) => members(data, roster.ids.length));
  if (alive.some((held, at) => held && !delivered[at])) {
    refuse("A device is called a survivor that delivered no shares.");
  }
  if (!alive[own]) refuse("This device is called missing. It signs nothing, and reveals nothing.");
  const around = neighbours.filter((peer) => alive[peer]).length;
  const enough = alive.filter(Boolean).length >= roster.plan.survivors && around >= roster.plan.threshold;
  if (!enough) refuse("Too few devices survived. No share was revealed.");
  const signature = await sign(key, await survivorsBytes(terms, state, roster, survivors));
  return { ...state, phase: "agreed", survivors, sent: encode({ round: state.round, signature }) };
}

/** Reveal one share of each neighbour, once a quorum of others has signed the same list: of a survivor that of its
 * seed, of a missing one that of its pair key, never both. All secrets are dropped. @param {Terms} terms
 * @param {Round} state
 * @param {Bytes} message secagg/agreements/1 @returns {Promise<Round>} */
export async function reveal(terms, state, message) {
  const { signatures, signers } = opened(state, "agreed", message, ["signatures", "signers"]);
  const { roster, own, neighbours } = await surroundings(terms, state);
  const [alive, delivered, signed] = [state.survivors, state.sharers, signers].map((data) =>
    members(data, roster.ids.length)
  );
  const who = roster.ids.map((_, at) => at).filter((at) => signed[at]);
  if (signatures.length !== who.length * SIGNATURE_SIZE) refuse("The signatures are not as many as is said.");
  const data = await survivorsBytes(terms, state, roster, state.survivors);
  const others = who.map(async (signer, at) => {
    const signature = signatures.slice(at * SIGNATURE_SIZE, (at + 1) * SIGNATURE_SIZE);
    return signer !== own && alive[signer] && (await verify(roster.publics[signer], signature, data));
  });
  const found = (await Promise.all(others)).filter(Boolean).length;
  if (found < roster.plan.quorum) refuse(`${found} others signed these survivors; ${roster.plan.quorum} are needed.`);
  const present = neighbours.filter((peer) => delivered[peer]);
  const shown = present.map((peer, at) => shareShown(state.shares[at], alive[peer])).filter((each) => each !== null);
  const sent = encode({ held: bitmap(state.shares.map(Boolean)), round: state.round, shares: concat(...shown) });
  return { ...state, phase: "revealed", root: NONE, shares: [], adverts: NONE, sent };
}

/** @param {Bytes | null} content @param {boolean} survived @returns {Bytes | null} */
function shareShown(content, survived) {
  if (content === null) return null;
  return survived ? content.slice(SHARE_SIZE) : content.slice(0, SHARE_SIZE);
}

/** What a device signs when it agrees to a list of survivors. @param {Terms} terms @param {Round} state
 * @param {Roster} roster @param {Bytes} survivors */
async function survivorsBytes(terms, state, roster, survivors) {
  const view = await viewOf(roster, state.sharers, state.publication);
  return concat(toUtf8("crowdml/secagg/survivors/1"), encode([terms.task, state.round, view, survivors]));
}

/** @param {Terms} terms @param {Round} state */
async function surroundings(terms, state) {
  const roster = await readRoster(terms, state.round, state.roster);
  const own = roster.ids.indexOf(state.me);
  return { roster, own, neighbours: await neighboursOf(roster.ids, roster.hash, own, roster.plan) };
}

/** The pair key, the sealing key and the seed of the self-mask. @param {Terms} terms
 * @param {{ root: Bytes, round: number }} state */
async function secretsOf(terms, { root, round }) {
  if (root.length !== 32) refuse("The secrets of this round are gone: it is over for this device.");
  const salt = await saltOf(terms.task, round, NONE);
  const names = ["pair key", "sealing key", "seed"];
  const [pairSecret, sealingSecret, seed] = await Promise.all(names.map((name) => derive(root, salt, name)));
  const [pair, sealing] = await Promise.all([pairSecret, sealingSecret].map(agreementKeyFromSecret));
  return { pair, pairSecret, sealing, seed };
}

/** @param {Terms} terms @param {number} round @param {{ pair: Bytes, seal: Bytes, commitment: Bytes }} keys */
function advertBytes(terms, round, { pair, seal: sealing, commitment }) {
  return concat(toUtf8("crowdml/secagg/advert/1"), encode([terms.task, round, pair, sealing, commitment]));
}

/** A server's message of this round, which is heard once, in its phase. @param {Round} state @param {Phase} phase
 * @param {Bytes} message @param {readonly string[]} names of its bytes @returns {{ [name: string]: Bytes }} */
function opened(state, phase, message, names) {
  const found = asMap(decode(message), [...names, "round"], "The message of this round");
  if (asCount(found.round, "round", 0) !== state.round) refuse("A message of another round came.");
  if (state.phase !== phase) refuse(`This device has ${state.phase}, and hears this once, after it has ${phase}.`);
  return Object.fromEntries(names.map((name) => [name, asBytes(found[name], name, { most: 2 ** 30 })]));
}

/** @param {string} why @returns {never} */
function refuse(why) {
  throw new Problem("round-refused", why);
}
