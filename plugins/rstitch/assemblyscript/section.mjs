// Puts policy.json into the module, as the section by which a server knows what the policy is.
import { readFileSync } from "node:fs";
import { Transform } from "assemblyscript/transform";

export default class extends Transform {
  afterCompile(module) {
    const text = JSON.stringify(JSON.parse(readFileSync(new URL("policy.json", import.meta.url), "utf8")));
    module.addCustomSection("tokenrouter:policy", new TextEncoder().encode(text));
  }
}
