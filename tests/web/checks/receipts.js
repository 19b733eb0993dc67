/** receipts.json: signatures over Merkle roots, and the chain. */

import { fromHex, toHex } from "../../../src/crowdml/web/device/bytes.js";
import * as receipts from "../../../src/crowdml/web/device/receipts.js";
import { check, equal, refused } from "./expect.js";

/**
 * @typedef {{ device: string, seq: number, index: number, hash: string, chain: string, encoded: string }} Row
 * @param {{ server_key: string, task: string, chain_0: string, receipts: Row[] }} vectors
 */
export function checks(vectors) {
  const [serverKey, task] = [fromHex(vectors.server_key), fromHex(vectors.task)];
  return [
    ...vectors.receipts.map((row, at) =>
      check(`receipt ${at}`, async () => {
        const found = receipts.openReceipt(fromHex(row.encoded));
        const sent = { task, device: row.device, seq: row.seq, hash: fromHex(row.hash) };
        equal([found.index, toHex(found.chain)], [row.index, row.chain], "its place");
        equal(receipts.answers(found, sent), true, "whether it answers");
        equal(receipts.answers(found, { ...sent, seq: row.seq + 1 }), false, "whether it answers another");
        equal(await receipts.verifyReceipt(found, serverKey), true, "its signature");
        equal(await receipts.verifyReceipt({ ...found, index: row.index + 1 }, serverKey), false, "of another place");
        await refused(() => receipts.openReceipt(fromHex(`${row.encoded}00`)));
      })
    ),
    check("the chain binds each to those before", async () => {
      let chain = await receipts.chainStart(task);
      equal(toHex(chain), vectors.chain_0, "the chain's beginning");
      for (const row of vectors.receipts) {
        chain = await receipts.chainNext(chain, { task, device: row.device, seq: row.seq, hash: fromHex(row.hash) });
        equal(toHex(chain), row.chain, `the chain at ${row.index}`);
      }
    }),
  ];
}
