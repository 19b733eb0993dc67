/** requests.json: headers, enrolments and owners' links. Where a browser signs at random, signatures are verified. */

import { concat, fromBase64url, fromHex, sha256, toHex, toUtf8 } from "../../../src/crowdml/web/device/bytes.js";
import { keyFromSecret, verify } from "../../../src/crowdml/web/device/keys.js";
import * as requests from "../../../src/crowdml/web/device/requests.js";
import { check, equal, refused } from "./expect.js";

/**
 * @typedef {{ method: string, target: string, body: string, seconds: number, header: string }} Header
 * @typedef {{ code: string, tasks: string[], body: string, signature: string }} Enrolment
 * @typedef {{ device: string, at: number, for: number, query: string }} Link
 * @typedef {{ device: string, server_key: string, tasks: string[], encoded: string }} Enrolled
 * @param {{ secret: string, authorization: Header[], enrolment: Enrolment[], enrolled: Enrolled, owner_link: Link[]
 * }} vectors
 */
export function checks(vectors) {
  const key = keyFromSecret(fromHex(vectors.secret));
  return [
    ...vectors.authorization.map((row) =>
      check(`${row.method} ${row.target}`, async () => {
        const body = fromHex(row.body);
        const header = await requests.authorize(await key, row.method, row.target, body, row.seconds + 0.5);
        equal(header.slice(0, -86), row.header.slice(0, -86), "the header");
        const lines = `crowdml/request/1\n${row.method}\n${row.target}\n${row.seconds}\n${toHex(await sha256(body))}`;
        for (const each of [header, row.header]) await signed((await key).public, each.slice(-86), toUtf8(lines));
      })
    ),
    ...vectors.enrolment.map((row) =>
      check(`enrol with ${row.code}`, async () => {
        const { body, signature } = await requests.enrol(await key, row.code, row.tasks.toReversed());
        equal(toHex(body), row.body, "the body");
        const data = concat(toUtf8("crowdml/enrol/1"), await sha256(body));
        for (const each of [signature, row.signature]) await signed((await key).public, each, data);
      })
    ),
    check("the answer to an enrolment", async () => {
      const { device, server_key, tasks, encoded } = vectors.enrolled;
      const found = requests.openEnrolled(fromHex(encoded));
      equal({ ...found, serverKey: toHex(found.serverKey) }, { device, serverKey: server_key, tasks }, "it");
      const weak = encoded.replace(server_key, "00".repeat(32));
      equal((await refused(() => requests.openEnrolled(fromHex(weak)))).slug, "malformed", "a weak key");
    }),
    ...vectors.owner_link.map((row) =>
      check(`a link for ${row.for} seconds`, async () => {
        const query = await requests.ownerLink(await key, row.at, row.for);
        equal(query.slice(0, -86), row.query.slice(0, -86), "the query");
        const data = toUtf8(`crowdml/owner/1\n${row.device}\n${row.at}\n${row.for}`);
        for (const each of [query, row.query]) await signed((await key).public, each.slice(-86), data);
      })
    ),
  ];
}

/** @param {Uint8Array<ArrayBuffer>} publicKey @param {string} signature @param {Uint8Array<ArrayBuffer>} data */
async function signed(publicKey, signature, data) {
  equal(await verify(publicKey, fromBase64url(signature), data), true, "the signature");
}
