/** keys.json, and the published vectors of X25519 (RFC 7748) and HKDF (RFC 5869). */

import { fromHex, toHex, toUtf8 } from "../../../src/crowdml/web/device/bytes.js";
import * as keys from "../../../src/crowdml/web/device/keys.js";
import { check, equal, refused } from "./expect.js";

/** @typedef {{ secret: string, public: string, id: string, signature_of_hello: string }} Case */

const HELLO = toUtf8("hello");
/** @param {Case[]} vectors */
export function checks(vectors) {
  return [
    ...vectors.map((row) => check(row.id, () => signs(row))),
    check("a new key signs what it can verify", async () => {
      await keys.checkBrowser();
      const key = await keys.generateKey();
      equal(key.private.extractable, false, "whether the private half can be read");
      const signature = await keys.sign(key, HELLO);
      equal(await keys.verify(key.public, signature, HELLO), true, "its signature");
      equal(await keys.verify(key.public, signature, toUtf8("hallo")), false, "its signature of something else");
      equal(await keys.verify(key.public, signature.slice(1), HELLO), false, "a short signature");
      equal(await keys.verify(new Uint8Array(32).fill(255), signature, HELLO), false, "by no key");
    }),
    check("keys that anybody could sign for are not sound", () => {
      const points = [
        "00".repeat(32),
        `01${"00".repeat(31)}`,
        `ec${"ff".repeat(30)}7f`,
        `ed${"ff".repeat(30)}7f`,
        `ec${"ff".repeat(31)}`,
        `${"00".repeat(31)}80`,
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
      ];
      for (const point of points) equal(keys.isSound(fromHex(point)), false, point);
      equal(keys.isSound(fromHex(vectors[0].public)), true, "an honest key");
    }),
    check("two keys agree on one secret, and no point of low order is taken", async () => {
      const [own, other] = [await keys.generateAgreementKey(), await keys.generateAgreementKey()];
      const shared = toHex(await keys.agree(own, other.public));
      equal(toHex(await keys.agree(other, own.public)), shared, "the other's");
      const again = await keys.agreementKeyFromSecret(await keys.agreementSecret(own));
      equal(toHex(again.public), toHex(own.public), "the key of its own secret");
      equal((await refused(() => keys.agree(own, new Uint8Array(32)))).slug, "malformed", "low order");
      const another = fromHex(`f6${"ff".repeat(30)}7f`); // 9, the base point, in another than its one encoding
      equal((await refused(() => keys.agree(own, another))).slug, "malformed", "another encoding");
    }),
    check("X25519 and HKDF are those of the RFCs", async () => {
      const own = await keys.agreementKeyFromSecret(fromHex(RFC7748.secret));
      equal(toHex(await keys.agree(own, fromHex(RFC7748.other))), RFC7748.shared, "X25519");
      const salt = fromHex("000102030405060708090a0b0c");
      const found = await keys.hkdf(new Uint8Array(22).fill(11), salt, fromHex("f0f1f2f3f4f5f6f7f8f9"), 42);
      equal(toHex(found), RFC5869, "HKDF");
    }),
  ];
}

const RFC7748 = {
  secret: "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
  other: "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c",
  shared: "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552",
};
const RFC5869 = "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865";

/** @param {Case} row */
async function signs(row) {
  const key = await keys.keyFromSecret(fromHex(row.secret));
  equal([toHex(key.public), key.id], [row.public, row.id], "the key");
  const given = fromHex(row.signature_of_hello);
  equal(await keys.verify(key.public, given, HELLO), true, "the vector's signature");
  equal(await keys.verify(key.public, await keys.sign(key, HELLO), HELLO), true, "its own signature");
  equal(keys.isSound(key.public), true, "whether it is sound");
}
