use super::*;
use crate::constraint::mask_words;
use crate::request::SamplingParams;

const FIXED: Fixed = Fixed { model: ModelId(1), vocabulary: 1000, group: 2, net_list: 0 };

fn rows<'a>(
    context: &'a [TokenId],
    pages: &'a [u32],
    range: (usize, usize),
    sampled: usize,
    params: &'a SamplingParams,
) -> Rows<'a> {
    Rows {
        context,
        start: range.0,
        end: range.1,
        pages,
        sampled,
        scored: 0,
        sampling: params,
        prompt_len: 1,
        masked: &[],
        nets: &[],
        allowed: &[],
    }
}

#[test]
fn a_batch_is_cut_by_rows_and_by_slots() {
    let params = SamplingParams::default();
    let context: Vec<TokenId> = (0..300).collect();
    let pages: Vec<u32> = (0..20).collect();
    let batch = RowBatch {
        sequences: vec![
            rows(&context, &pages, (0, 150), 1, &params),
            rows(&context, &pages, (7, 8), 1, &params),
            rows(&context, &pages, (100, 230), 130, &params),
        ],
        ..RowBatch::default()
    };
    let steps = steps(&batch, 100);
    let part = |sequence, start, end, slots| Part { sequence, start, end, slots };
    assert_eq!(
        steps,
        [
            vec![part(0, 0, 100, 0)],
            vec![part(0, 100, 150, 1), part(1, 7, 8, 1), part(2, 100, 149, 49)],
            vec![part(2, 149, 213, 64)],
            vec![part(2, 213, 230, 17)],
        ]
    );
    for step in &steps {
        assert!(step.iter().map(|p| p.end - p.start).sum::<usize>() <= 100);
        assert!(step.iter().map(|p| p.slots).sum::<usize>() <= SLOTS);
    }
}

#[test]
fn the_words_of_a_step() {
    let params = SamplingParams { temperature: 0.5, top_k: 20, seed: 3, ..SamplingParams::default() };
    let context: Vec<TokenId> = (500..600).collect();
    let (first, second) = ([7, 8, 9], [4]);
    let masked = [11, 12];
    let batch = RowBatch {
        sequences: vec![
            Rows { masked: &masked, ..rows(&context, &first, (14, 35), 2, &params) },
            rows(&context, &second, (3, 4), 1, &params),
        ],
        ..RowBatch::default()
    };
    let layout = UploadLayout { rows: 64 };
    let mut words = vec![u32::MAX; layout.page_list() + 10];
    let steps = steps(&batch, 64);
    let step = fill(&batch, &steps[0], layout, false, FIXED, &mut words).unwrap();
    assert_eq!((step.rows, step.slots.len(), step.list), (22, 3, 20));
    assert_eq!(&words[..5], &[22, 3, step.items as u32, 0, 0]);
    assert_eq!(words[layout.tokens()..][..2], [514, 515]);
    assert_eq!(words[layout.positions()..][..3], [14, 15, 16]);
    assert_eq!(words[layout.page_starts() + 21], 5, "after the pages and masked tokens of the first sequence");
    assert_eq!(words[layout.page_list()..][..6], [7, 8, 9, 11, 12, 4]);
    assert_eq!(step.words, layout.page_list() + 6);
    // Items: two rows before the end of a page, then by fours, each within a page.
    let items: Vec<&[u32]> = words[layout.items()..][..step.items * ITEM_WORDS].chunks(ITEM_WORDS).collect();
    assert_eq!(items[0][..5], [0, 2, 14, 0, 14]);
    assert_eq!(items[1][..5], [2, 4, 16, 0, 14]);
    assert_eq!(items.last().unwrap()[..5], [21, 1, 3, 5, 3]);
    assert_eq!(items.iter().map(|item| item[1]).sum::<u32>(), 22);
    assert!(items.iter().all(|item| item[2] / 16 == (item[2] + item[1] - 1) / 16));
    // Sampling parameters of the last row.
    let last = &words[layout.samples() + 2 * PARAMS_WORDS..][..PARAMS_WORDS];
    assert_eq!((last[0], last[1], last[3], last[10]), (21, mode::LIST, 20, 20));
    assert_eq!(f32::from_bits(last[2]), 2.0);
    let drawn = f64::from_bits(u64::from(last[6]) | u64::from(last[7]) << 32);
    assert_eq!(drawn, random::uniform(3, 4, 1));
}

#[test]
fn what_the_device_cannot_draw_is_left_to_the_host() {
    let context: Vec<TokenId> = (0..8).collect();
    let pages = [0];
    let mode_of = |params: &SamplingParams| {
        let batch = RowBatch { sequences: vec![rows(&context, &pages, (7, 8), 1, params)], ..RowBatch::default() };
        let layout = UploadLayout { rows: 64 };
        let mut words = vec![0; layout.page_list() + 10];
        let step = fill(&batch, &steps(&batch, 64)[0], layout, false, FIXED, &mut words).unwrap();
        assert_eq!(step.slots[0].on_host, words[layout.samples() + 1] == mode::HOST);
        words[layout.samples() + 1]
    };
    let drawn = SamplingParams { temperature: 1.0, ..SamplingParams::default() };
    assert_eq!(mode_of(&SamplingParams { temperature: 0.0, ..drawn.clone() }), mode::GREEDY);
    assert_eq!(mode_of(&drawn), mode::ALL);
    assert_eq!(mode_of(&SamplingParams { top_k: 128, top_p: 0.5, ..drawn.clone() }), mode::LIST);
    assert_eq!(mode_of(&SamplingParams { top_k: 129, ..drawn.clone() }), mode::HOST);
    assert_eq!(mode_of(&SamplingParams { top_k: 1000, ..drawn.clone() }), mode::ALL);
    assert_eq!(mode_of(&SamplingParams { top_p: 0.9, ..drawn.clone() }), mode::HOST);
    assert_eq!(mode_of(&SamplingParams { repetition_penalty: 1.1, ..drawn.clone() }), mode::HOST);
    assert_eq!(mode_of(&SamplingParams { logit_bias: vec![(3, 1.0)], ..drawn }), mode::HOST);
}

#[test]
fn allowed_tokens_go_along_where_the_device_draws() {
    let (context, pages) = ((0..8).collect::<Vec<TokenId>>(), [0]);
    let masks: Vec<u32> = (1..=2 * mask_words(FIXED.vocabulary) as u32).collect();
    let upload = |params: &SamplingParams| {
        let sequence = Rows { allowed: &masks, ..rows(&context, &pages, (6, 8), 2, params) };
        let batch = RowBatch { sequences: vec![sequence], ..RowBatch::default() };
        let layout = UploadLayout { rows: 64 };
        let mut words = vec![0; layout.page_list() + 1 + masks.len()];
        let step = fill(&batch, &steps(&batch, 64)[0], layout, false, FIXED, &mut words).unwrap();
        let allowed = [0, 1].map(|slot| words[layout.samples() + slot * PARAMS_WORDS + 11] as usize);
        let list = words[layout.page_list()..step.words].to_vec();
        (words[layout.samples() + 1], allowed, list)
    };
    let drawn = SamplingParams { temperature: 1.0, min_tokens: 99, ..SamplingParams::default() };
    for (params, mode) in [(SamplingParams::greedy(), mode::GREEDY), (drawn.clone(), mode::ALL)] {
        let (used, allowed, list) = upload(&params);
        assert_eq!((used, allowed), (mode, [2, 2 + masks.len() / 2]), "one past the place, behind a page");
        assert_eq!(list[1..], masks);
    }
    for params in [SamplingParams { top_k: 20, ..drawn.clone() }, SamplingParams { presence_penalty: 1.0, ..drawn }] {
        assert_eq!(upload(&params), (mode::HOST, [0, 0], vec![0]));
    }
}

#[test]
fn a_list_that_does_not_fit_is_an_error() {
    let params = SamplingParams::default();
    let context: Vec<TokenId> = (0..100).collect();
    let pages: Vec<u32> = (0..10).collect();
    let batch = RowBatch { sequences: vec![rows(&context, &pages, (99, 100), 1, &params)], ..RowBatch::default() };
    let layout = UploadLayout { rows: 64 };
    let mut words = vec![0; layout.page_list() + 5];
    let error = fill(&batch, &steps(&batch, 64)[0], layout, false, FIXED, &mut words).unwrap_err();
    assert_eq!(error, "pages and masked tokens of a step take 7 words, 5 are left");
}
