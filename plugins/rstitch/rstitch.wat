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

  (func (export "tr_route") (param $rows i32) (result i32)
    (local $small i32) (local $threshold f64) (local $to i32) (local $leave i32)
    (local $at i32) (local $end i32)
    (local.set $small (i32.eqz (i32.load (i32.const 0))))                   ;; 1 at the small model (0)
    (local.set $threshold (f64.load offset=0x100 (i32.const 0)))
    ;; To the other model: its number plus 1. The small model's candidate is dropped.
    (local.set $to (i32.add (local.get $small) (i32.const 1)))
    (local.set $leave (i32.shl (local.get $small) (i32.const 31)))
    (local.set $end (i32.mul (local.get $rows) (i32.const 4)))
    (loop $next
      ;; The small model hands over where it is uncertain, the large one (1) where it is not. NaN is not
      ;; above any threshold. No branch: which rows are handed over cannot be predicted.
      (i32.store offset=0x400 (local.get $at)
        (select (local.get $to) (i32.const 0)
          (i32.eq
            (f64.gt
              (f64.promote_f32 (f32.load offset=0x1000 (local.get $at)))    ;; entropy_norm
              (local.get $threshold))
            (local.get $small))))
      ;; Read only where the row is handed over.
      (i32.store offset=0x800 (local.get $at) (local.get $leave))
      (local.set $at (i32.add (local.get $at) (i32.const 4)))
      (br_if $next (i32.lt_u (local.get $at) (local.get $end))))
    (local.get $rows)))
