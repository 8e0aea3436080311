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
    (local $end i32) (local $at i32)
    (local.set $end (i32.mul (local.get $rows) (i32.const 4)))
    (block $done
      (loop $next
        (br_if $done (i32.eq (local.get $at) (local.get $end)))
        ;; The small model (0) hands over where it is uncertain, the large one (1) where it is not. NaN is
        ;; not above any threshold.
        (if (i32.eq
              (f64.gt
                (f64.promote_f32 (f32.load offset=0x1000 (local.get $at)))  ;; entropy_norm
                (f64.load offset=0x100 (i32.const 0)))                      ;; threshold
              (i32.eqz (i32.load (i32.const 0))))                           ;; at the small model
          (then
            ;; To the other model: its number plus 1.
            (i32.store offset=0x400 (local.get $at) (i32.sub (i32.const 2) (i32.load (i32.const 0))))
            ;; The small model's candidate is dropped.
            (i32.store offset=0x800 (local.get $at)
              (select (i32.const 0) (i32.const 0x80000000) (i32.load (i32.const 0))))))
        (local.set $at (i32.add (local.get $at) (i32.const 4)))
        (br $next)))
    (local.get $rows)))
