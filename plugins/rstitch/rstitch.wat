;; R-Stitch as a WASM policy: the rule of src/lib.rs, with the same settings. docs/policies.md describes the
;; block and the section.
(module
  (@custom "tokenrouter:policy"
    "{\"abi\": 1, \"name\": \"rstitch\", \"version\": \"0.1.0\","
    " \"roles\": [\"slm\", \"llm\"], \"entry\": \"slm\", \"signals\": [\"entropy_norm\"],"
    " \"settings\": {\"threshold\": {"
    "   \"description\": \"Entropy, divided by ln of the vocabulary size, above which the large model writes.\","
    "   \"type\": \"number\", \"minimum\": 0, \"maximum\": 1, \"default\": 0.03}}}")
  (memory (export "memory") 1)
  (global (export "tr_block") i32 (i32.const 0))

  ;; Four rows at a time and no branch: which rows are handed over cannot be predicted. What is written for
  ;; rows that do not exist, up to three, is within the columns, and nobody reads it.
  (func (export "tr_route") (param $rows i32) (result i32)
    (local $model i32) (local $large v128) (local $threshold v128) (local $to v128) (local $leave v128)
    (local $at i32) (local $end i32)
    (local.set $model (i32.load (i32.const 0)))
    (local.set $large (i32x4.splat (i32.sub (i32.const 0) (local.get $model))))   ;; all bits at the large model (1)
    (local.set $threshold (f64x2.splat (f64.load offset=0x100 (i32.const 0))))
    ;; To the other model: its number plus 1. The small model's candidate is dropped.
    (local.set $to (i32x4.splat (i32.sub (i32.const 2) (local.get $model))))
    (local.set $leave (i32x4.splat (i32.shl (i32.eqz (local.get $model)) (i32.const 31))))
    (local.set $end (i32.mul (local.get $rows) (i32.const 4)))
    (loop $next
      ;; The small model hands over where it is uncertain, the large one where it is not. NaN is not above
      ;; any threshold.
      (v128.store offset=0x400 (local.get $at)
        (v128.and (local.get $to)
          (v128.xor (local.get $large)
            (i8x16.shuffle 0 1 2 3 8 9 10 11 16 17 18 19 24 25 26 27              ;; of each f64 one half
              (f64x2.gt
                (f64x2.promote_low_f32x4 (v128.load64_zero offset=0x1000 (local.get $at)))   ;; entropy_norm
                (local.get $threshold))
              (f64x2.gt
                (f64x2.promote_low_f32x4 (v128.load64_zero offset=0x1008 (local.get $at)))
                (local.get $threshold))))))
      ;; Read only where the row is handed over.
      (v128.store offset=0x800 (local.get $at) (local.get $leave))
      (local.set $at (i32.add (local.get $at) (i32.const 16)))
      (br_if $next (i32.lt_u (local.get $at) (local.get $end))))
    (local.get $rows)))
